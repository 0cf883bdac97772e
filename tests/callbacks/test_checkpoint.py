"""Checkpoints: at the end of a run, and resumed; at chosen steps: test_alone.py, test_kl_guard.py."""

import signal

import pandas as pd
import pytest
import torch
from lightning.pytorch import Callback

from pacmr_lightning.callbacks import RunCheckpoint
from pacmr_lightning.runs.loggers import ContinuedCSVLogger

from .conftest import Module, fit


def rows_of(folder):
    return pd.read_csv(folder / "metrics.csv")[["step", "epoch", "val/loss"]].values.tolist()


def step_of(path):
    return torch.load(path, weights_only=True)["global_step"]


def test_fewer_best_states_than_a_checkpoint_has(tmp_path):
    fewer = RunCheckpoint(tmp_path, monitor="val/loss", mode="min", save_top_k=2)
    fewer.load_state_dict(fewer.state_dict() | {"best_k_models": {"a": 3.0, "b": 1.0, "c": 2.0}})
    assert fewer.best_k_models == {"b": 1.0, "c": 2.0}
    assert (fewer.kth_best_model_path, fewer.kth_value) == ("c", 2.0)


@pytest.mark.parametrize("every", [5, 4])
def test_last_is_the_end(tmp_path, every):
    """Twelve updates and six more from their checkpoint equal one run."""
    folder = tmp_path / "checkpoints"
    options = {"every_n_train_steps": every, "save_last": True, "dirpath": folder}
    fit(tmp_path, [RunCheckpoint(**options)])
    assert step_of(folder / "last.ckpt") == 12 and not (folder / "last-v1.ckpt").exists()
    resumed, whole = Module(), Module()
    fit(tmp_path, [RunCheckpoint(**options)], resumed, resume=folder / "last.ckpt", max_epochs=5)
    fit(tmp_path / "whole", [], whole, max_epochs=5, enable_checkpointing=False)
    assert torch.equal(resumed.slope, whole.slope)
    assert step_of(folder / "last.ckpt") == 20


def test_last_is_the_end_of_a_run_that_was_stopped(tmp_path):
    """A signal comes before any save; the resumed run has a callback of its own."""
    stop, last = Callback(), tmp_path / "checkpoints/last.ckpt"
    stop.on_train_batch_end = lambda trainer, *_: trainer.global_step == 2 and signal.raise_signal(15)
    with pytest.raises(SystemExit):
        fit(tmp_path, [RunCheckpoint(), stop])
    assert step_of(last) == 2
    fit(tmp_path, [RunCheckpoint()], resume=last)
    assert [path.name for path in last.parent.glob("last*")] == ["last.ckpt"] and step_of(last) == 12


def test_a_run_that_was_moved_keeps_as_many_states(tmp_path):
    fit(tmp_path / "run", [RunCheckpoint(every_n_train_steps=5)])
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    last = moved / "checkpoints/last.ckpt"
    fit(moved, [RunCheckpoint(every_n_train_steps=5)], resume=last, max_epochs=5)
    assert len([*last.parent.iterdir()]) == 2


def test_two_runs_with_one_callback(tmp_path):
    checkpoint = RunCheckpoint(monitor="val/loss")
    for run in "aba":
        fit(tmp_path / run, [checkpoint])
    assert len(list(tmp_path.glob("[ab]/checkpoints/*.ckpt"))) == 4


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 11, "max_epochs": -1}])
@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_end"])
def test_a_failure_at_the_end_costs_one_update(tmp_path, limit, hook):
    def fail(trainer, _):
        if trainer.global_step == trainer.estimated_stepping_batches:
            raise MemoryError

    failing = Callback()
    setattr(failing, hook, fail)

    def run(name, *callbacks, resume=None):
        folder, callbacks = tmp_path / name, [RunCheckpoint(every_n_train_steps=100), *callbacks]
        logger = ContinuedCSVLogger(folder, name="", version="")
        fit(folder, callbacks, resume=resume, logger=logger, val_check_interval=1, **limit)
        return rows_of(folder)

    expected = run("whole")
    with pytest.raises(MemoryError):
        run("failed", failing)
    last = tmp_path / "failed/checkpoints/last.ckpt"
    assert step_of(last) == len(expected) - 1
    assert run("failed", resume=last) == expected and step_of(last) == len(expected)


@pytest.mark.parametrize(
    ("every", "check", "limit"),
    [(1, 2, {"max_epochs": 3}), (2, 4, {"max_steps": 12, "max_epochs": -1}), (3, 2, {"max_epochs": 3})],
)
def test_steps_and_validations_are_counted_once(tmp_path, every, check, limit):
    """A run killed in any of its twelve updates and resumed logs what an uninterrupted one logs."""

    def run(name, resume=None, die_at=None):
        folder = tmp_path / name
        options = {"every_n_train_steps": every, "save_last": True, "enable_version_counter": False}
        logger = ContinuedCSVLogger(folder, name="", version="")
        callback = RunCheckpoint(dirpath=folder / "checkpoints", **options)
        options = {"logger": logger, "val_check_interval": check, **limit}
        fit(folder, [callback], Module(die_at=die_at), resume=resume, **options)
        return folder

    expected = rows_of(run("whole"))
    assert len(expected) == 3 * (4 // check)
    for die_at in range(every + 1, 12):
        with pytest.raises(RuntimeError, match="killed"):
            run(str(die_at), die_at=die_at)
        folder = run(str(die_at), tmp_path / str(die_at) / "checkpoints" / "last.ckpt")
        assert rows_of(folder) == expected
        paths = (each / "checkpoints/last.ckpt" for each in (folder, tmp_path / "whole"))
        loops = [torch.load(path, weights_only=True)["loops"]["fit_loop"] for path in paths]
        assert loops[0] == loops[1]
