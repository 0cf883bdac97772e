"""pacmr refine: audit, second pass and comparison of a real run, restarted at each stage."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from pacmr_lightning import cli
from pacmr_lightning.audit import audit, pipeline
from pacmr_lightning.commands.refine import FURTHEST, USES, doubts, folder_beside, objective_options, refine
from pacmr_lightning.errors import UserError
from pacmr_lightning.runs.finished_run import find_run, load_run
from pacmr_lightning.runs.folder import read_weights, unmoved

from ...conftest import write_lines
from .conftest import PAIRS, fit, fit_words, refused, world_rows


@pytest.fixture(scope="module")
def refined(learned, tmp_path_factory):
    run = shutil.copytree(learned, tmp_path_factory.mktemp("refined") / "first")
    refine(str(run))
    return run.with_name("first-refined")


def config_of(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())


def test_the_second_pass(refined, learned):
    """Everything of the first run's configuration, and the audit's probabilities as soft labels."""
    audited = pd.read_parquet(refined / "audit" / "pairs.parquet").set_index("id")
    # The first run has no VNet.
    assert audited["a"].isna().all() and (audited["weight"] == 1).all()
    recorded = read_weights(refined)
    assert len(recorded) == 3 * PAIRS
    expected = audited["p_majority"][recorded["id"]].to_numpy()
    np.testing.assert_allclose(recorded["weight"], expected, rtol=1e-6)
    before, after = config_of(learned), config_of(refined)
    changed = after["model"]["init_args"]
    assert changed.pop("method") == "first-refined"
    weighting = changed.pop("weighting")
    assert weighting["class_path"].endswith("AuditedWeights")
    assert weighting["init_args"]["soft_labels"] and not weighting["init_args"]["hard"]
    for name in ("method", "weighting"):
        del before["model"]["init_args"][name]
    for config in (before, after):
        del config["trainer"]["default_root_dir"]
    assert [config["data"]["init_args"].pop("reference") for config in (before, after)] == ["live", "cached"]
    assert before == after
    summary = json.loads((refined / "summary.json").read_text())
    assert summary["method"] == "first-refined" and summary["steps"] == 3 * PAIRS // 8
    assert (refined / "audit" / "report.html").exists()


def test_labels_that_follow_a_rule(finished, tmp_path, capsys):
    """Are named by the audit; a run without a validation is compared, too."""
    noise = ("--data.noise_rate", "0", "--data.noise", "SpuriousPreferenceNoise", "--data.noise.share", "0.3")
    noise += ("--trainer.limit_val_batches", "0", "--trainer.max_epochs", "1")
    run = fit(finished, tmp_path / "run", *noise)
    capsys.readouterr()
    refine(str(run))
    assert pd.read_csv(tmp_path / "run-refined" / "audit" / "shortcuts.csv")["kind"].tolist() == ["length"]
    said = capsys.readouterr()
    assert "Labels follow a shortcut: " in " ".join((said.out + said.err).split())
    assert "first-refined" in said.out and f"errors: {tmp_path}/run-refined/audit/report.html" in said.err


def test_going_on(refined, tmp_path, capsys, monkeypatch):
    """What is done is not done again; a killed fit goes on, or starts anew where it left no checkpoint."""
    folder = tmp_path / "copies"
    shutil.copytree(refined.parent, folder)
    run, second = folder / "first", folder / "first-refined"
    record = json.loads((second / "refine.json").read_text()) | {"run": str(run)}
    (second / "refine.json").write_text(json.dumps(record))
    table = second / "audit" / "pairs.parquet"
    summary = (second / "summary.json").read_text()
    seen = table.stat().st_mtime_ns, (second / "summary.json").stat().st_mtime_ns
    monkeypatch.setattr("pacmr_lightning.commands.refine.doubts", lambda *runs: ["A doubt."])
    refine(str(run))
    assert seen == (table.stat().st_mtime_ns, (second / "summary.json").stat().st_mtime_ns)
    said = capsys.readouterr()
    assert "first-refined" in said.out and "A doubt." in said.err

    (second / "summary.json").unlink()
    shutil.rmtree(second / "checkpoints")
    refine(str(run))
    again = json.loads((second / "summary.json").read_text())
    same = json.loads(summary)
    for numbers in (again, same):
        del numbers["seconds"], numbers["wall_seconds"]
    assert again == same and table.stat().st_mtime_ns == seen[0]

    (second / "summary.json").unlink()
    refine(str(run))
    assert json.loads((second / "summary.json").read_text())["steps"] == again["steps"]

    with pytest.raises(UserError, match="already holds a second pass with labels soft; name another with"):
        refine(str(run), labels="drop")
    monkeypatch.setattr("pacmr_lightning.datamodules.PreferenceDataModule.setup", None)
    with pytest.raises(UserError, match="was trained with the audit in its folder; name another one"):
        audit(str(second))

    last = run / "checkpoints" / "last.ckpt"
    torch.save(torch.load(last, weights_only=True) | {"trained": "again"}, last)
    with pytest.raises(UserError, match=r"already holds a second pass with checkpoint last \(.*\);"):
        refine(str(run))


@pytest.mark.parametrize("labels", ["swap", "drop"])
def test_what_suspects_are_used_for(finished, tmp_path, labels):
    rows = [row | ({"label": "tie"} if i % 4 == 1 else {}) for i, row in enumerate(world_rows(PAIRS, 0))]
    data = ("--data.source.train", str(write_lines(tmp_path / "ties.jsonl", rows)))
    first, folder = fit(finished, tmp_path / "first", *data), tmp_path / labels
    refine(str(first), str(folder), labels=labels, noise_rate=0.3, beta=2.0, threshold=0.2)
    assert config_of(folder)["model"]["init_args"]["objective"]["init_args"]["beta"] == 2.0
    assert USES[labels].items() <= config_of(folder)["model"]["init_args"]["weighting"]["init_args"].items()
    audited = pd.read_parquet(folder / "audit" / "pairs.parquet").set_index("id")
    tied, doubtful = audited["votes_for"].eq(0.5), audited["p"] < 0.5
    right = audited["suggested"].eq("keep").astype(float).mask(tied, 0.5 if labels == "swap" else 1)
    assert right.eq(0).any() and (tied & doubtful).any() and (doubtful & right.eq(1) & ~tied).any()
    recorded = read_weights(folder)
    np.testing.assert_allclose(recorded["weight"], right[recorded["id"]].to_numpy(), rtol=1e-6)
    assert recorded["a"].isna().all()
    # The noise exchanges ties, too, which are no wrong labels.
    assert (recorded["flipped"].isna() == tied[recorded["id"]].to_numpy()).all()
    mask = pd.read_parquet(first / "noise_mask.parquet").set_index("id")["flipped"][tied.index]
    counts = json.loads((folder / "summary.json").read_text())["counts"]["train"]
    assert mask[tied].any() and counts["flipped"] == (mask & ~tied).sum()


def test_decisions_by_hand(first, capsys):
    """The second pass has decided labels as told, and the share of the sample that was read."""
    truth = pd.read_parquet(first / "noise_mask.parquet").set_index("id")["flipped"]
    read = truth.index[:24]
    wrong, right = {"decision": "swap", "observed": "rejected"}, {"decision": "keep", "observed": "chosen"}
    path = first.with_name("decisions.jsonl")
    write_lines(path, [{"id": name, "sample": True} | (wrong if truth[name] else right) for name in read])
    refine(str(first), decisions=str(path), labels="weights")
    second = first.with_name("first-refined")
    said = f"reviewed by hand, {truth[read].sum()} are wrong: {truth[read].mean():.1%}"
    assert said in (second / "audit" / "report.html").read_text()
    weights = read_weights(second).groupby("id")["weight"].first()
    assert weights[read].tolist() == [1 - truth[name] for name in read]
    assert not weights.drop(read).isin([0, 1]).any()
    path.write_text(path.read_text().replace("keep", "unsure"))
    with pytest.raises(UserError, match=r"already holds a second pass with decisions .*; name another with"):
        refine(str(first), decisions=str(path), labels="weights")


def in_order(run, audited):
    """Whether each update had the pairs that a direct calculation says, from easy to difficult."""
    loss = np.log1p(np.exp(-audited["cross_fit_u"].to_numpy()))
    easiest = audited["id"].to_numpy()[loss.argsort()][: PAIRS * 3 // 4].reshape(-1, 8)
    visits = read_weights(run).groupby("step")["id"].agg(set)
    return len(visits), [set(easiest[i % len(easiest)]) for i in range(len(visits))] == visits.tolist()


def test_the_easiest_pairs_from_easy_to_difficult(first, tmp_path):
    refine(str(first), labels="easiest", easiest=0.75, scorer="dpo", beta=2.0)
    folder = first.with_name("first-refined")
    audited = pd.read_parquet(folder / "audit" / "pairs.parquet")
    assert in_order(folder, audited) == (3 * PAIRS * 3 // 32, True)
    assert (read_weights(folder)["weight"] == 1).all()
    assert json.loads((folder / "refine.json").read_text())["easiest"] == 0.75
    counts = json.loads((folder / "summary.json").read_text())["counts"]["train"]
    assert counts["kept"] == PAIRS and counts["easiest"] == PAIRS * 3 // 4

    for as_trained, count in ((True, PAIRS * 3 // 4), (False, PAIRS)):
        _, data, _ = load_run(find_run(str(folder), "last"), as_trained=as_trained)
        data.setup("fit")
        assert len(data.train_pairs) == count

    again = ("fit", "--config", f"{folder}/config.yaml", "--trainer.default_root_dir", f"{tmp_path}/x")
    cli.main([*again, "--trainer.max_steps", "5"])
    cli.main([*again, "--trainer.max_steps", "10", "--ckpt_path", "last"])
    assert in_order(tmp_path / "x", audited) == (10, True)
    with pytest.raises(SystemExit):  # other pairs, so not the same run
        cli.main([*again, "--ckpt_path", "last", "--data.curriculum_share", "0.6"])


WEIGHTS = "--model.weighting AuditedWeights --model.weighting.audit {table}"
CURRICULUM = "--data.curriculum {table}"


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (lambda table: table.iloc[3:], WEIGHTS, f"lacks 3 of {PAIRS} training pairs"),
        (lambda table: table[["id", "u"]], WEIGHTS, "is no table of pacmr audit"),
        (None, WEIGHTS.format(table="nowhere"), "There is no file nowhere; pacmr audit RUN writes such a"),
        (lambda table: table.assign(p_majority=np.nan), WEIGHTS, "could not predict the labels, so it"),
        (None, WEIGHTS + " --data.noise_seed 7", "the other label; audit a run with the same noise"),
        (lambda table: table.assign(texts="x"), WEIGHTS, f"saw {PAIRS} of {PAIRS} training pairs with"),
        (None, CURRICULUM + " --data.noise_seed 7", "the other label; audit a run with the same noise"),
        (lambda table: table.assign(cross_fit_u=np.nan), CURRICULUM, "no cross-fitted u, by which pairs"),
        (None, CURRICULUM + " --data.curriculum_share 0.1", "Only 6 training pairs are left, fewer than"),
        (None, CURRICULUM + " --data.curriculum_share 0.001", "Only 0 training pairs are left, fewer than"),
        (None, "--data.curriculum_share 0.4", "but there is no curriculum"),
    ],
)
def test_an_audit_that_does_not_fit(change, words, message, refined, learned, tmp_path, capsys):
    table = pd.read_parquet(refined / "audit" / "pairs.parquet")
    table["cross_fit_u"] = np.linspace(-1, 1, PAIRS)
    (table if change is None else change(table)).to_parquet(tmp_path / "pairs.parquet")
    options = words.format(table=tmp_path / "pairs.parquet").split()
    assert message in refused(capsys, *fit_words(learned, tmp_path / "run", *options))
    assert not (tmp_path / "run").exists()


def test_a_folder_with_other_files_and_a_run_without_summary_are_left_alone(first, tmp_path, capsys):
    """Before the audit; a second pass clears its folder of what a killed fit left, so not others'."""
    (tmp_path / "mine" / "thesis").mkdir(parents=True)
    (tmp_path / "mine" / "notes.txt").write_text("of years")
    said = refused(capsys, "refine", first, "--output", tmp_path / "mine")
    assert "mine holds notes.txt, which is no part of a second pass" in said
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["notes.txt", "thesis"]
    (first / "summary.json").unlink()
    assert "summary" in refused(capsys, "refine", first)
    assert not first.with_name("first-refined").exists()


def test_the_folder_beside_a_run(first, monkeypatch):
    monkeypatch.chdir(first)
    for run in (".", "../first/"):
        assert folder_beside(run, "refined").resolve() == first.with_name("first-refined")


@pytest.mark.parametrize(("name", "replaced"), [("RDPO", True), ("DrDPO", True), ("IPO", False)])
def test_objectives_that_make_their_own_of_wrong_labels(name, replaced, capsys):
    options = {"class_path": f"pacmr_lightning.objectives.{name}", "init_args": {"beta": 0.3}}
    found = objective_options({"objective": options}, None)
    assert found == ({"model.objective": "DPO"} if replaced else {}) | {"model.objective.beta": "0.3"}
    assert objective_options({"objective": None}, 2.0) == {"model.objective.beta": "2.0"}
    assert (name in capsys.readouterr().out) == replaced


def test_labels_that_cannot_be_predicted(first, monkeypatch, capsys):
    """Nothing is kept that would stand in the way of another try, and a given rate is enough."""
    fit = pipeline.agreement
    coin = lambda *asked, **options: replace(fit(*asked, **options), gain=0.0)  # noqa: E731
    monkeypatch.setattr(pipeline, "agreement", coin)
    with pytest.raises(UserError, match=r"cannot be predicted .* better than by a coin.* --anyway"):
        refine(str(first))
    printed = " ".join(capsys.readouterr().out.split())
    assert "With a known rate of random flips, --noise_rate RATE marks labels all the same" in printed
    assert not (first.with_name("first-refined") / "refine.json").exists()
    refine(str(first), noise_rate=0.3)
    printed = " ".join(capsys.readouterr().out.split())
    assert "better than by a coin, so p may carry no information" in printed
    assert (first.with_name("first-refined") / "summary.json").exists()


EASIEST = "{run} --labels easiest --scorer dpo"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere", "nowhere/config.yaml does not exist; name the folder of a run"),
        ("{run} --output {run}", "already holds another run; name another with --output"),
        ("{run} --labels easiest", "scorer is not given, but labels easiest needs cross-fitted u"),
        (EASIEST + " --easiest 1.5", "easiest is 1.5, but it must be above 0"),
        (EASIEST + " --noise_rate 0.3", "noise_rate is given, but labels is easiest, which does not use it"),
        ("{run} --beta -1", "beta is -1.0, but it must be above 0"),
        ("{run} --easiest 0.3", "easiest is 0.3, but labels soft does not use it"),
    ],
)
def test_bad_input(words, message, first, capsys):
    assert message in refused(capsys, "refine", *words.format(run=first).split())
    assert not first.with_name("first-refined").exists()


@pytest.mark.parametrize(
    ("second", "said"),
    [
        # As good, or as far as chance makes them differ: twice 0.058 with 143 pairs.
        ({"metrics": {"val/sequence_kl": FURTHEST}}, []),
        ({"val_accuracy": 0.5}, []),
        ({"val_accuracy": None, "metrics": {}, "val_pairs": None}, []),
        ({"val_accuracy": 0.469}, ["0.469 against 0.594 on 143 pairs: read some of its"]),
        ({"val_accuracy": 0.5, "val_pairs": 1000}, ["0.500 against 0.594 on 1,000 pairs"]),
        (
            {"metrics": {"val/sequence_kl": 51.14}, "val_accuracy": 0.469},
            ["has a high KL to the reference, 51.1 nats (the first run's: 9.4): read some", "0.469 against"],
        ),
    ],
)
def test_warnings_on_a_second_pass(second, said):
    first = {"val_accuracy": 0.594, "metrics": {"val/sequence_kl": 9.4}, "val_pairs": 143}
    found = doubts(first, first | second)
    assert len(found) == len(said) and all(words in line for words, line in zip(said, found, strict=True))


def test_policies_that_moved_or_were_not_validated():
    still = {"val/loss": 0.6928, "val/rewards/margins": 7e-4, "val/kl": 2.6e-7}
    assert unmoved(still)
    for changed in ({"val/rewards/margins": -0.02}, {"val/kl": 1e-3}, {"val/loss": None}):
        assert unmoved(still | changed) is None
    assert unmoved(still | {"val/guard/restored_step": 0}) is None, "KLGuard has said why"
