"""An adapter and a whole model that come without a run: the same u, and the audit's files."""

import shutil
from doctest import DocTestFinder, DocTestRunner
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning import cli
from pacmr_lightning.audit import AuditOptions
from pacmr_lightning.audit import audit as whole_audit
from pacmr_lightning.datamodules import Files, HubPreferences, pairs_of
from pacmr_lightning.datamodules.tokenizer import load_tokenizer
from pacmr_lightning.errors import UserError
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.runs.folder import weight_parts

from ...conftest import read_lines, write_lines
from .conftest import audit, refused


@pytest.fixture(scope="module")
def exports(finished, tmp_path_factory):
    """A folder with an adapter and a whole model of the run; and the run's u by id, labels as found."""
    run = shutil.copytree(finished, tmp_path_factory.mktemp("exports") / "run")
    for name, merged in (("adapter", []), ("whole", ["--merged"])):
        cli.main(["export", str(run), str(run.with_name(name)), *merged])
    table = audit(run, "policy", noise_rate=0.3).set_index("id")
    return run.parent, table["u"].where(table["observed"] == "chosen", -table["u"])


@pytest.fixture
def exported(exports, inside):
    folder, u = exports
    for name in ("adapter", "whole"):
        shutil.copytree(folder / name, name)
    return u


def options(finished, **changed):
    source = {"source": "Files", "source.train": str(finished.parent / "train.jsonl")}
    words = {**source, "output": "found", "noise_rate": "0.3", **changed}
    return [word for name, value in words.items() if value is not None for word in (f"--{name}", value)]


@pytest.mark.parametrize("policy", ["adapter", "whole"])
def test_the_u_of_its_run(policy, finished, exported, capsys):
    base = None if policy == "adapter" else str(finished.parent / "model")
    cli.main(["audit", policy, *options(finished, reference=base, cleaned="cleaned.jsonl", action="swap")])
    table = pd.read_parquet("found/pairs.parquet").set_index("id")
    assert set(table.index) == set(exported.index)
    # A model does not tell the run's beta, 1.0: its u is with 0.1.
    np.testing.assert_allclose(table["u"] / 0.1, exported[table.index], atol=2e-3, rtol=1e-3)
    assert table["annotator"].isin(["a0", "a1", "a2"]).all() and (table["observed"] == "chosen").all()
    before, after = read_lines(finished.parent / "train.jsonl"), read_lines("cleaned.jsonl")
    assert table["flipped"].notna().sum() == sum(row.get("flipped") is not None for row in before)
    suspected = set(table.index[table["suggested"] == "swap"])
    assert suspected == set(table.index[table["p"] < 0.5])
    exchanged = [b["chosen"] != a["chosen"] for b, a in zip(before, after, strict=True)]
    assert sum(exchanged) == len(suspected)
    page = Path("found/report.html").read_text()
    assert "Scores are u of" in page and "As far as it has memorised them, p is too high" in page


def test_a_probe_reads_the_base_of_an_adapter(finished, exported):
    for model in ("adapter", str(finished.parent / "model")):
        cli.main(["audit", model, *options(finished, scorer="probe", output=Path(model).name)])
    first, second = (pd.read_parquet(f"{name}/pairs.parquet") for name in ("adapter", "model"))
    pd.testing.assert_frame_equal(first, second)


def test_before_any_training(finished, inside):
    model = str(finished.parent / "model")
    rows = [by_one_word(i, wrong=i % 4 == 0) for i in range(240)]
    path = write_lines("pairs.jsonl", rows)
    # Four words are enough: the scorer of a base model is a probe.
    cli.main(["audit", model, "--data", path, "--output", "found", "--noise_rate", "0.25"])
    table = pd.read_parquet("found/pairs.parquet").set_index("id")
    assert table["delta"].isna().all() and (table["u"] == table["probe_u"]).all()
    wrong = table.index.map(lambda name: int(name) % 4 == 0)
    assert table["p"][wrong].mean() < 0.4 and table["p"][~wrong].mean() > 0.8
    # Decisions on half of them: lengths and the base model's log-probabilities join the probe.
    decided = [{"id": str(i), "decision": "keep" if i % 4 else "swap"} for i in range(120)]
    words = ["--decisions", write_lines("decided.jsonl", decided), "--output", "again"]
    cli.main(["audit", model, "--data", path, "--dtype", "float32", *words])
    again = pd.read_parquet("again/pairs.parquet").set_index("id").loc[table.index]
    tokenizer = load_tokenizer(model)
    for row in rows[:8]:
        chosen, rejected = (len(tokenizer(row[side])["input_ids"]) for side in ("chosen", "rejected"))
        assert again.at[row["id"], "length_difference"] == chosen - rejected
    assert again["reference_difference"].abs().max() > 0 and (again["probe_u"] == table["probe_u"]).all()
    others = again.drop(index=[row["id"] for row in decided])
    assert others["p"].rank().equals(others["combined_u"].rank())
    page = Path("again/report.html").read_text()
    assert "The score is learned from 120 decisions" in page and "weighted by the decisions by hand" in page
    page = Path("found/report.html").read_text()
    cleaned = [row["id"] for row in read_lines("found/cleaned.jsonl")]
    assert cleaned == [row["id"] for row in rows if table["suggested"][row["id"]] == "keep"]
    assert "Scores are those of a linear probe on" in page and "fitted to the labels of other prompts" in page
    words = f"""
        fit --config {finished}/config.yaml --trainer.default_root_dir first --trainer.max_steps 3
        --data.source.train {path} --data.noise_rate 0 --model.weighting AuditedWeights
        --model.weighting.soft_labels true --model.weighting.audit found/pairs.parquet
    """
    cli.main(words.split())
    found = pd.concat(map(pd.read_parquet, weight_parts("first"))).set_index("id")["weight"]
    assert len(found) == 24
    np.testing.assert_allclose(found, table["p_majority"][found.index], rtol=1e-5)


def by_one_word(number: int, wrong: bool) -> dict:
    sides = [f" a golden {number % 7}", f" a hollow {number % 5}"][:: -1 if wrong else 1]
    return {"id": str(number), "prompt": f"Number {number}:", "chosen": sides[0], "rejected": sides[1]}


def test_one_instruction_for_all(finished, monkeypatch, inside, capsys):
    """Rows of a common response are one group, that no response is scored by its own label."""
    rows = [
        {"id": str(i), "prompt": "A joke:", "chosen": f" a golden {i // 2}", "rejected": f" a hollow {i}"}
        for i in range(240)
    ]
    for row in rows[::4]:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    words = ["audit", str(finished.parent / "model"), "--noise_rate", "0.25", "--data"]
    cli.main([*words, write_lines("rows.jsonl", rows)])
    table = pd.read_parquet("audit/pairs.parquet").set_index("id")
    wrong = table.index.map(lambda name: int(name) % 4 == 0)
    assert table["p"][wrong].mean() < 0.4 and table["p"][~wrong].mean() > 0.8
    page = Path("audit/report.html").read_text()
    assert "240 of 240 pairs have the same prompt" in page and "are one group of 120, and" in page
    monkeypatch.setattr(PolicyModel, "build", None)  # refused before the model is read
    one = [row | {"chosen": " a golden 1"} for row in rows if " g" in row["chosen"]]
    said = refused(capsys, *words, write_lines("one.jsonl", one))
    assert "form 1 groups without common texts, but a linear probe needs 5" in said


@pytest.mark.parametrize(
    ("policy", "changed", "said"),
    [
        (
            "whole",
            {"scorer": "policy"},
            "whole is a whole model, not an adapter, so its reference is unknown",
        ),
        ("adapter", {"scorer": "probe", "reference": "whole"}, "reference is whole, but a linear probe"),
        ("adapter", {"checkpoint": "3"}, "checkpoint is 3, but adapter is a model and no run; leave it out"),
        ("adapter", {"scorer": "dpo"}, "scorer is dpo, but adapter is a model and no run; use --scorer"),
        ("adapter", {"source.train": "nowhere.jsonl"}, "nowhere.jsonl"),
        ("nowhere", {"reference": "nowhere/x/y"}, "folder nowhere/x/y does not exist"),
    ],
)
def test_bad_input(policy, changed, said, finished, exported, capsys):
    assert said in refused(capsys, "audit", policy, *options(finished, **changed))
    assert not Path("found").exists()


def test_models_runs_and_their_pairs(finished, exported, capsys):
    assert "There is no folder whol of a run; did you mean whole?" in refused(capsys, "audit", "whol")
    assert "a run; give the pairs, as in --data" in refused(capsys, "audit", "some/model")
    said = refused(capsys, "audit", "whole", "--output", "found")
    assert "whole is a model and no run; give the pairs, as in --data pairs.jsonl." in said
    said = refused(capsys, "audit", finished, *options(finished))
    assert "run is a run, which has its own pairs; leave it out" in said
    shutil.copytree(Path(finished), "sft")
    Path("sft/model").mkdir()
    assert "name its model, sft/model." in refused(capsys, "audit", "sft", *options(finished))


def test_from_python(finished, inside):
    model, path = finished.parent / "model", finished.parent / "train.jsonl"
    options = AuditOptions("probe", str(inside / "found"), noise_rate=0.3)
    found = whole_audit(str(model), Files(str(path)), options)
    assert found.noise_rate == 0.3
    assert found.statement.startswith(f"{len(found.suspected)} of 64 labels are probably wrong")
    assert found.statement.endswith("at a given rate of random flips of 30.0%.")
    assert all(file.is_file() and file.parent == inside / "found" for file in found.files.values())
    # A name is enough: of a file, which may be missing, or of a dataset.
    assert isinstance(pairs_of("missing.jsonl"), Files) and isinstance(pairs_of("owner/x"), HubPreferences)
    Path("audit").mkdir()
    names = ("audit/cleaned.jsonl", "audit/cleaned.parquet")
    for name in names:
        shutil.copy(path, name)
    pd.read_json(path, lines=True).to_parquet("pairs.parquet")
    for data, options, why in (
        ("audit/cleaned.jsonl", AuditOptions(), "audit/cleaned.jsonl, where the source's own rows are"),
        ("pairs.parquet", AuditOptions(output="."), "pairs.parquet, where the source's own rows are"),
        ("pairs.parquet", AuditOptions(cleaned="audit/pairs.parquet"), "cleaned is .*the audit's own table"),
    ):
        with pytest.raises(UserError, match=why):
            whole_audit(model, data, options)
    for kept in (True, False):
        unknown = whole_audit(model, str(path))
        assert [Path(name).exists() for name in names] == [kept] * 2, "nothing is suspected here"
    assert unknown.noise_rate is None and unknown.files["report.html"] == Path("audit/report.html")
    coin = "These 64 labels cannot be predicted from the scores better than by a coin, so no label is"
    assert unknown.statement == f"{coin} suspected." and unknown.suspected.empty
    assert list(unknown.with_texts())[3:] == ["prompt", "chosen", "rejected"]
    page = Path("audit/report.html").read_text()
    for words in (coin, "the ranks say which pairs to read first", "labels that the scorer contradicts most"):
        assert words in page


def test_the_example_of_the_docstring(finished, inside):
    shutil.copytree(finished.parent / "model", "model")
    write_lines("pairs.jsonl", [by_one_word(i, wrong=i % 4 == 0) for i in range(240)])
    [example] = DocTestFinder().find(whole_audit, "audit", globs={"audit": whole_audit})
    assert len(example.examples) > 3 and DocTestRunner().run(example).failed == 0
