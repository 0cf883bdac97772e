"""What ends pacmr quickstart early; make quickstart runs the whole of it."""

from pathlib import Path

import pytest

from pacmr_lightning import cli

from ...conftest import fails


def test_a_folder_that_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs/quickstart").mkdir(parents=True)
    said = "output is runs/quickstart, which exists; remove it, or name another folder with --output."
    assert said in fails(capsys, ["quickstart"])


def test_a_part_that_fails(tmp_path, monkeypatch, capsys, commands_here):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["quickstart", "--sft_rows", "0", "--output", "q"])
    assert stop.value.code == 2 and not Path("q").exists()
    assert "rows is 0, but it must be at least 1" in capsys.readouterr().err
    assert len(commands_here) == 1 and commands_here[0][0][:3] == ["fit", "--config", "quickstart/sft"]
