"""What ends pacmr quickstart early; make quickstart runs the whole of it."""

from pathlib import Path

from ...conftest import fails


def test_a_folder_that_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs/quickstart").mkdir(parents=True)
    said = "output is runs/quickstart, which exists; remove it, or name another folder with --output."
    assert said in fails(capsys, ["quickstart"])


def test_a_part_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = fails(capsys, ["quickstart", "--sft_rows", "0", "--output", "q"])
    assert "rows is 0, but it must be at least 1" in said and not Path("q").exists()
