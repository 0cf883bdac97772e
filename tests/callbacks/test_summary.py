import json
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pacmr_lightning.callbacks import RunSummary, WeightRecorder, run_summary
from pacmr_lightning.commands.compare import compare
from pacmr_lightning.runs.folder import read_weights

PROMISED = [
    *("method", "task", "noise_rate", "seed", "steps", "val_accuracy", "val_margin", "metrics", "counts"),
    *("val_pairs", "val_step"),
    *("weight_mean_unflipped", "weight_mean_flipped", "weight_gap", "flip_auroc", "flip_auroc_u"),
    *("window_pairs", "seconds", "wall_seconds", "pairs_per_second", "versions"),
]
TIMES = ("seconds", "wall_seconds", "pairs_per_second")


def summary_of(folder):
    def fail(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((folder / "summary.json").read_text(), parse_constant=fail)


def without_time(summary):
    return {key: value for key, value in summary.items() if key not in TIMES}


def test_the_numbers_of_a_run(fit, tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    pl.seed_everything(7)
    fit(tmp_path, [RunSummary(window=50), WeightRecorder()])
    summary = summary_of(tmp_path)
    assert set(PROMISED) == set(summary)
    assert {key: summary[key] for key in ("method", "task", "noise_rate", "seed", "steps")} == {
        "method": "pacmr",
        "task": "toy",
        "noise_rate": 0.25,
        "seed": 7,
        "steps": 12,
    }
    assert summary["val_accuracy"] == 0.75
    assert summary["val_margin"] == 1.5
    assert summary["val_step"] == 12
    assert summary["metrics"] == pytest.approx(
        {"val/loss": 0.3, "val/rewards/accuracies": 0.75, "val/rewards/margins": 1.5}
    )
    assert summary["counts"] == {"train": 32, "dropped": {"too_long": 0}}
    assert set(summary["versions"]) == {"torch", "lightning", "transformers", "peft"}
    assert summary["window_pairs"] == 56, "all 8 visits of the earliest step that 50 reach"
    last = read_weights(tmp_path).iloc[-56:]
    means = last.groupby("flipped")["weight"].mean()
    assert summary["weight_mean_flipped"] == pytest.approx(means[True], rel=1e-6)
    assert summary["weight_mean_unflipped"] == pytest.approx(means[False], rel=1e-6)
    assert summary["weight_gap"] == pytest.approx(means[False] - means[True], rel=1e-6)
    assert summary["weight_gap"] > 0
    assert summary["flip_auroc"] == summary["flip_auroc_u"] == 1.0
    assert summary["wall_seconds"] > summary["seconds"] > 0
    assert summary["pairs_per_second"] == pytest.approx(96 / summary["seconds"])


def test_an_older_validation_says_its_step(fit, tmp_path, capsys):
    """Three epochs of four updates, validated in the second only, and resumed after it."""
    saving = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=10, save_top_k=-1)
    fit(tmp_path, [RunSummary(), saving], check_val_every_n_epoch=2)
    assert (summary_of(tmp_path)["val_step"], summary_of(tmp_path)["steps"]) == (8, 12)
    (resume,) = (tmp_path / "checkpoints").iterdir()
    fit(tmp_path, [RunSummary()], resume=resume, check_val_every_n_epoch=2)
    assert summary_of(tmp_path)["val_step"] == 8
    capsys.readouterr()
    compare([str(tmp_path)])
    said = capsys.readouterr().out.replace("\n", " ")
    said = " ".join(said.split())
    assert "accuracy after update 8 of 12" in said
    assert "wall time: whole fit" in said and "gold reward" not in said, "notes of its columns only"
    pairs = summary_of(tmp_path)["val_pairs"]
    assert (f"accuracy: on {pairs} validation pairs only" in said) == bool(pairs)


NO_VALIDATION = ("val_accuracy", "val_margin", "val_pairs", "val_step")
NO_GAP = ("weight_mean_flipped", "weight_gap", "flip_auroc")


@pytest.mark.parametrize(
    ("flip", "kind", "options", "expected"),
    [
        # Equal weights rank nothing.
        (
            lambda i: i % 4 == 0,
            "dpo",
            {},
            {"weight_mean_unflipped": 1.0, "weight_mean_flipped": 1.0, "weight_gap": 0.0, "flip_auroc": None}
            | {"flip_auroc_u": 1.0},
        ),
        # Nothing is known.
        (
            lambda i: None,
            "pacmr",
            {"limit_val_batches": 0},
            {**dict.fromkeys((*NO_VALIDATION, *NO_GAP, "flip_auroc_u", "weight_mean_unflipped"))}
            | {"noise_rate": None, "seed": None, "window_pairs": 0, "metrics": {}},
        ),
        # No flip is among the known, and a metric is NaN.
        (
            lambda i: False if i % 2 else None,
            "pacmr",
            {"val_margin": float("nan")},
            {"window_pairs": 48, "val_margin": None, **dict.fromkeys(NO_GAP)},
        ),
    ],
)
def test_null_where_nothing_is_known(
    flip, kind, options, expected, fit, tmp_path, make_module, make_data, monkeypatch
):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    module = make_module(kind, val_margin=options.pop("val_margin", 1.5))
    data = make_data(flip)
    data.noise_rate = expected.get("noise_rate", 0.25)
    fit(tmp_path, [RunSummary()], module, data, **options)
    summary = summary_of(tmp_path)
    assert expected == {key: summary[key] for key in expected}
    allowed = {*(key for key, value in expected.items() if value is None), "seed", "val_pairs"}
    assert {key for key, value in summary.items() if value is None} <= allowed | {"flip_auroc_u"}
    margin = summary["metrics"].get("val/rewards/margins")
    assert margin is None if kind == "pacmr" else margin == 1.5


def test_unknown_flips_are_visits_too(fit, tmp_path, make_data):
    data = make_data(lambda i: i < 16 if i % 2 else None)
    fit(tmp_path, [RunSummary(window=20), WeightRecorder()], data=data)
    summary = summary_of(tmp_path)
    last = read_weights(tmp_path).iloc[-24:]
    assert summary["window_pairs"] == last["flipped"].notna().sum() == 12
    means = last.groupby("flipped")["weight"].mean()
    assert summary["weight_gap"] == pytest.approx(means[False] - means[True], rel=1e-6)


def test_resume_goes_on_counting(fit, tmp_path, make_module):
    fit(tmp_path / "whole", [RunSummary(window=90)])
    folder = tmp_path / "killed"
    with pytest.raises(RuntimeError, match="killed"):
        fit(folder, [RunSummary(window=90), ModelCheckpoint(every_n_epochs=1)], make_module(die_at=7))
    assert not (folder / "summary.json").exists()
    (checkpoint,) = folder.rglob("*.ckpt")
    before = torch.load(checkpoint, weights_only=False)["RunSummary"]["seconds"]
    fit(folder, [RunSummary(window=90)], resume=checkpoint)
    assert without_time(summary_of(folder)) == without_time(summary_of(tmp_path / "whole"))
    assert summary_of(folder)["seconds"] > before > 0
    assert summary_of(folder)["pairs_per_second"] == pytest.approx(96 / summary_of(folder)["seconds"])


def test_validation_is_not_training_time(fit, tmp_path, make_module, monkeypatch):
    """On a clock that training moves by seconds and validation by hours."""
    now = 0.0

    def taking(seconds, step):
        def timed(self, batch, batch_idx):
            nonlocal now
            now += seconds
            return step(self, batch, batch_idx)

        return timed

    for name, seconds in (("training_step", 2), ("validation_step", 3600)):
        monkeypatch.setattr(make_module, name, taking(seconds, getattr(make_module, name)))
    monkeypatch.setattr(run_summary, "time", SimpleNamespace(perf_counter=lambda: now))
    fit(tmp_path, [RunSummary()])
    assert now > 3 * 3600 and summary_of(tmp_path)["seconds"] == 12 * 2


def test_the_same_callback_in_two_runs(fit, tmp_path):
    callback = RunSummary()
    fit(tmp_path / "a", [callback])
    fit(tmp_path / "b", [callback], max_epochs=1)
    assert summary_of(tmp_path / "b")["window_pairs"] == 32


def test_a_finished_run_keeps_its_summary(fit, tmp_path):
    fit(tmp_path, [RunSummary(), ModelCheckpoint(every_n_epochs=3)])
    before = summary_of(tmp_path)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    fit(tmp_path, [RunSummary()], resume=checkpoint)
    assert summary_of(tmp_path) == before


@pytest.mark.slow
def test_two_processes_agree_with_one(two_processes, fit, tmp_path):
    fit(tmp_path, [RunSummary(window=50)])
    alone = without_time(summary_of(tmp_path))
    whole = summary_of(two_processes / "whole")
    assert without_time(whole) == without_time(summary_of(two_processes / "resumed"))
    assert whole["pairs_per_second"] == pytest.approx(96 / whole["seconds"])
    assert whole["window_pairs"] == 56
    for key in ("flip_auroc", "flip_auroc_u", "steps", "counts", "val_accuracy", "window_pairs"):
        assert whole[key] == alone[key]
    for key in ("weight_mean_unflipped", "weight_mean_flipped", "weight_gap"):
        assert whole[key] == pytest.approx(alone[key], abs=1e-6)
