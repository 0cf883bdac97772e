"""Lines on what takes long."""

import time

from pacmr_lightning import waiting as module
from pacmr_lightning.waiting import waiting


def test_a_line_and_then_the_time(capsys, monkeypatch):
    with waiting("Quick"):
        pass
    monkeypatch.setattr(module, "FIRST", 0.02)
    monkeypatch.setattr(module, "NEXT", 0.05)
    with waiting("Loading"):
        time.sleep(0.5)
    assert capsys.readouterr().err.splitlines()[:2] == ["Loading ...", "Loading ... 0 s"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    with waiting("Loading"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
