"""Every experiment answers --help, is in the index, and ends bad input in one sentence."""

from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
FRONTIER = ["frontier", str(FOLDER / "sweeps/frontier.yaml"), "--figure", "x.png", "--numbers"]
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "\nmain = " in path.read_text())


def test_all_experiments_are_found():
    assert len(NAMES) == 13


@pytest.mark.parametrize("name", NAMES)
def test_help_and_index(name, capsys):
    with pytest.raises(SystemExit) as stop:
        import_module(f"research.{name}").main(["--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m research.{name} ")
    assert f"python -m research.{name}" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["frontier", "nowhere.yaml"], "The sweep file nowhere.yaml cannot be read"),
        (FRONTIER[:-1], "give both"),
        ([*FRONTIER, f"{FOLDER}/numbers/meta-pairs.csv"], "lacks the columns beta; name another file"),
        ([*FRONTIER, f"{FOLDER}/numbers/told-nothing-report.csv"], "has no run of this sweep"),
        ([*FRONTIER, f"{FOLDER}/numbers/checkpoints.csv"], "has several rows of one run"),
        (["theory", "nowhere", "--output", "x"], "nowhere/config.yaml does not exist"),
        (["perp_correct", "nowhere"], "nowhere/summary.json does not exist"),
        (["real_text", "--figure", "/dev/null/x.png"], "/dev/null"),
        (["when_dpo_goes_wrong", "--figure", "x.png", "--folder", "nowhere"], "nowhere has no runs"),
        (["label_influence", "nowhere.jsonl", "--model", "x"], "nowhere.jsonl cannot be read"),
        (["votes", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["vote_folds", "few.jsonl", "--output", "x"], "0 pairs for fold 0; lower --train 800"),
        (["vote_policies", "nowhere"], "nowhere has no finished runs"),
        (["overview", "nowhere", "--figure", "x.png"], "nowhere"),
        (["probe", "nowhere", "--source", "Nothing"], "source: "),
        (["probe_sizes", "--figure", "/dev/null/x.png"], "/dev/null"),
    ],
)
def test_bad_input(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text('{"chosen": "a", "rejected": "b", "category": "c", "flipped": true}\n')
    with pytest.raises(SystemExit) as stop:
        import_module(f"research.{words[0]}").main(words[1:])
    assert stop.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error: " in line)
    assert message in line
