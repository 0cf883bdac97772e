"""Lines on what takes long."""

import time

from pacmr_lightning import waiting as module
from pacmr_lightning.waiting import waiting


def test_a_line_and_then_the_time(capsys, monkeypatch):
    monkeypatch.setattr(module, "FIRST", 0.02)
    monkeypatch.setattr(module, "NEXT", 0.05)
    with waiting("Loading"):
        time.sleep(0.5)
    first, *more = capsys.readouterr().err.splitlines()
    assert first == "Loading ..." and more and all(line.startswith("Loading ... 0 s") for line in more[:1])


def test_what_is_quick_or_another_rank_says_nothing(capsys, monkeypatch):
    with waiting("Loading"):
        pass
    monkeypatch.setattr(module, "FIRST", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with waiting("Loading"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
