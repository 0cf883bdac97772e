import json
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pacmr_lightning.callbacks import RunSummary, WeightRecorder, run_summary
from pacmr_lightning.commands.compare import compare
from pacmr_lightning.rewards import PairRecord
from pacmr_lightning.runs.folder import read_weights
from pacmr_lightning.weighting import VNetWeighting

from .conftest import Data, Module, fit

PROMISED = {
    *("method", "task", "noise_rate", "seed", "steps", "val_accuracy", "val_margin", "val_pairs"),
    *("metrics", "counts", "val_step", "seconds", "wall_seconds", "versions", "window_pairs"),
    *("weight_mean_unflipped", "weight_mean_flipped", "weight_gap", "flip_auroc", "flip_auroc_u"),
}


def summary_of(folder):
    """What JSON allows: neither NaN nor infinities."""
    return json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)


def test_the_numbers_of_a_run(tmp_path, monkeypatch):
    """Also of another run with the same callback, and of a fit that has nothing left to do."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    pl.seed_everything(7)
    callback, saving = RunSummary(window=50), ModelCheckpoint(every_n_epochs=3)
    fit(tmp_path, [callback, WeightRecorder(), saving])
    summary = summary_of(tmp_path)
    assert set(summary) == PROMISED
    known = {"method": "pacmr", "task": "toy", "noise_rate": 0.25, "seed": 7, "steps": 12, "val_step": 12}
    known |= {"val_accuracy": 0.75, "val_margin": 1.5, "counts": {"train": 32, "dropped": {"too_long": 0}}}
    known |= {"window_pairs": 56}  # all 8 visits of the earliest step that 50 reach
    assert known == {name: summary[name] for name in known}
    metrics = {"val/loss": 0.3, "val/rewards/accuracies": 0.75, "val/rewards/margins": 1.5}
    assert summary["metrics"] == pytest.approx(metrics)
    assert set(summary["versions"]) == {"torch", "lightning", "transformers", "peft"}
    means = read_weights(tmp_path).iloc[-56:].groupby("flipped")["weight"].mean()
    assert summary["weight_mean_flipped"] == pytest.approx(means[True], rel=1e-6)
    assert summary["weight_mean_unflipped"] == pytest.approx(means[False], rel=1e-6)
    assert summary["weight_gap"] == pytest.approx(means[False] - means[True], rel=1e-6)
    assert summary["flip_auroc"] == summary["flip_auroc_u"] == 1.0
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    fit(tmp_path, [RunSummary(window=50)], resume=checkpoint)
    assert summary_of(tmp_path) == summary

    # Some flips are unknown, one metric is not finite, and weights that are equal rank nothing.
    data = Data(lambda i: i < 16 if i % 2 else None)
    fit(tmp_path / "dpo", [callback], Module("dpo", val_margin=float("nan")), data, max_epochs=1)
    found = summary_of(tmp_path / "dpo")
    known = {"window_pairs": 16, "val_margin": None, "weight_mean_flipped": 1.0, "weight_gap": 0.0}
    known |= {"flip_auroc": None, "flip_auroc_u": 1.0}
    assert known == {name: found[name] for name in known}


def test_no_more_visits_are_held_than_the_window_needs():
    visits = RunSummary(window=20)
    for step in range(9):
        visits.add(step, PairRecord([], *[torch.zeros(6)] * 6))
    assert visits.of_this_rank()[:, 0].tolist() == [step for step in (5, 6, 7, 8) for _ in range(6)]


def test_null_where_nothing_is_known(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    data, module = Data(lambda i: None), Module()
    data.noise_rate, module.weighting = None, VNetWeighting()
    module.weighting.skipped = 3
    fit(tmp_path, [RunSummary()], module, data, limit_val_batches=0)
    assert "VNet learned nothing: its updates (3) were all skipped" in caplog.text
    summary = summary_of(tmp_path)
    nothing = {name for name, value in summary.items() if value is None}
    statistics = {name for name in PROMISED if name.startswith(("weight_", "flip_", "val_"))}
    assert nothing == statistics | {"noise_rate", "seed"}
    assert summary["window_pairs"] == 0 and summary["metrics"] == {}


def test_an_older_validation_says_its_step(tmp_path, capsys, monkeypatch):
    """Three epochs of four updates, validated in the second only, and resumed after it."""
    saving = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=10, save_top_k=-1)
    fit(tmp_path, [RunSummary(), saving], check_val_every_n_epoch=2)
    assert (summary_of(tmp_path)["val_step"], summary_of(tmp_path)["steps"]) == (8, 12)
    (resume,) = (tmp_path / "checkpoints").iterdir()
    fit(tmp_path, [RunSummary()], resume=resume, check_val_every_n_epoch=2)
    assert summary_of(tmp_path)["val_step"] == 8
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "40")
    compare([str(tmp_path), f"{tmp_path}/."])  # names fold at twelve characters
    said = " ".join(capsys.readouterr().out.split())
    assert "gap g u time" in said and said.count("pacmr, 25% 0.750") == said.count("test_an_olde ") == 2
    assert "accuracy after update 8 of 12" in said and ": whole fit" in said and "gold reward" not in said


def test_validation_is_not_training_time(tmp_path, monkeypatch):
    """On a clock that training moves by seconds and validation by hours; a resumed run goes on counting."""
    now = 0.0

    def taking(seconds, step):
        def timed(self, batch, batch_idx):
            nonlocal now
            now += seconds
            return step(self, batch, batch_idx)

        return timed

    for name, seconds in (("training_step", 2), ("validation_step", 3600)):
        monkeypatch.setattr(Module, name, taking(seconds, getattr(Module, name)))
    monkeypatch.setattr(run_summary, "time", SimpleNamespace(perf_counter=lambda: now))
    saving = ModelCheckpoint(tmp_path / "checkpoints", every_n_epochs=2)
    fit(tmp_path, [RunSummary(), saving])
    assert now > 3 * 3600 and summary_of(tmp_path)["seconds"] == 12 * 2
    whole = summary_of(tmp_path)["wall_seconds"]
    (resume,) = (tmp_path / "checkpoints").iterdir()
    fit(tmp_path, [RunSummary()], resume=resume)
    assert summary_of(tmp_path)["seconds"] == 12 * 2 and summary_of(tmp_path)["wall_seconds"] >= whole
