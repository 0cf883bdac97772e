"""An adapter and a whole model that come without a run: the same u, and the audit's files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning import cli
from pacmr_lightning.commands.audit import audit


@pytest.fixture(scope="module")
def exports(finished, tmp_path_factory):
    """A folder with an adapter and a whole model of the run; and the run's u by id, labels as found."""
    run = shutil.copytree(finished, tmp_path_factory.mktemp("exports") / "run")
    for name, merged in (("adapter", []), ("whole", ["--merged"])):
        cli.main(["export", str(run), str(run.with_name(name)), *merged])
    table = audit(str(run), "policy", share=0.3).set_index("id")
    return run.parent, table["u"].where(table["observed"] == "chosen", -table["u"])


@pytest.fixture
def exported(exports, tmp_path, monkeypatch):
    """Puts the adapter and the whole model into an empty folder; returns the run's u."""
    monkeypatch.chdir(tmp_path)
    folder, u = exports
    for name in ("adapter", "whole"):
        shutil.copytree(folder / name, name)
    return u


def options(run, **changed):
    source = {"source": "Files", "source.train": str(run.parent / "train.jsonl")}
    words = {**source, "beta": "1.0", "output": "found", "share": "0.3", **changed}
    return [word for name, value in words.items() if value is not None for word in (f"--{name}", value)]


@pytest.fixture
def train_file(finished, run):
    """Where the copy of the run looks for its pairs."""
    (run.parent / "train.jsonl").write_bytes((finished.parent / "train.jsonl").read_bytes())
    return run.parent / "train.jsonl"


@pytest.mark.parametrize("policy", ["adapter", "whole"])
def test_the_u_of_its_run(policy, run, finished, train_file, exported, capsys):
    base = None if policy == "adapter" else str(finished.parent / "model")
    cli.main(["audit-model", policy, *options(run, reference=base, cleaned="cleaned.jsonl", action="flip")])
    table = pd.read_parquet("found/pairs.parquet").set_index("id")
    assert set(table.index) == set(exported.index)
    np.testing.assert_allclose(table["u"], exported[table.index], atol=2e-3, rtol=1e-3)
    assert table["annotator"].isin(["a0", "a1", "a2"]).all() and (table["observed"] == "chosen").all()
    known = [json.loads(line).get("flipped") for line in train_file.read_text().splitlines()]
    assert table["flipped"].notna().sum() == sum(flag is not None for flag in known)
    suspects = set(table.index[table["suggested"] == "flip"])
    assert suspects == set(table.index[table["p_wrong"] > 0.5])
    before, after = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (train_file, Path("cleaned.jsonl"))
    )
    exchanged = [b["chosen"] != a["chosen"] for b, a in zip(before, after, strict=True)]
    assert sum(exchanged) == len(suspects)
    page = Path("found/report.html").read_text()
    assert "was trained elsewhere" in page and "so the share is likely to be higher" in page


@pytest.mark.parametrize(
    ("policy", "changed", "said"),
    [
        ("whole", {}, "policy is whole, which names no base model; give the model that its training began"),
        ("adapter", {"beta": "0"}, "beta is 0.0, but it must be above 0"),
        ("adapter", {"share": "0.7"}, "share is 0.7, but the share of wrong labels is above 0 and below"),
        ("adapter", {"action": "drop"}, "action is given without cleaned"),
        ("adapter", {"source.train": "nowhere.jsonl"}, "nowhere.jsonl"),
        ("nowhere", {"reference": "nowhere/x/y"}, "there is no such folder"),
    ],
)
def test_bad_input(policy, changed, said, run, train_file, exported, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["audit-model", policy, *options(run, **changed)])
    assert stop.value.code == 2 and said in capsys.readouterr().err
    assert not Path("found").exists()
