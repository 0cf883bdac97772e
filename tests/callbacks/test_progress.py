"""Printed progress, and pairs and tokens per second."""

import re
import warnings

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pacmr_lightning.batch import PairBatch, TrainingBatch
from pacmr_lightning.callbacks import LogProgress, Throughput
from pacmr_lightning.callbacks.progress import pairs_in, tokens_in


def test_counts_of_a_batch():
    pairs = PairBatch.collate(["a", "b"], [[1, 2], [1]], [[3], [3, 4]], [[5], [5]])
    meta = PairBatch.collate(["m"], [[1]], [[2]], [[3]])
    assert pairs_in(pairs) == pairs_in(TrainingBatch(pairs, meta)) == 2
    assert tokens_in(pairs) == tokens_in(TrainingBatch(pairs, meta)) == 8


@pytest.mark.parametrize("validation", [True, False])
def test_scalars_in_tensorboard(fit, tmp_path, validation):
    logger = TensorBoardLogger(tmp_path, name="tensorboard", version="")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*flops_per_batch")
        limits = {} if validation else {"limit_val_batches": 0}
        fit(tmp_path, [Throughput(window_size=3)], logger=logger, val_check_interval=2, **limits)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {f"wall_clock/train/device/{kind}_per_sec" for kind in ("items", "samples", "batches")} <= names
    assert {f"wall_clock/train/{kind}" for kind in ("time", "batches", "samples", "lengths")} <= names
    assert ("wall_clock/validate/samples" in names) == validation
    assert events.Scalars("wall_clock/train/samples")[-1].value == 96
    assert len(events.Scalars("wall_clock/train/device/items_per_sec")) == 10
    tokens, pairs = (
        events.Scalars(f"wall_clock/train/device/{kind}_per_sec")[-1].value for kind in ("items", "samples")
    )
    assert tokens == pytest.approx(4.5 * pairs)


def test_a_line_each_time(fit, tmp_path, capsys, make_module):
    class Logging(make_module):
        def training_step(self, batch, batch_idx):
            self.log("train/loss", 0.5 + self.global_step, prog_bar=True)
            return super().training_step(batch, batch_idx)

    fit(tmp_path, [LogProgress(seconds=0)], Logging())
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "12 updates done: train/loss 11.5"
    lines = [line for line in said if line.startswith("Update")]
    found = [re.fullmatch(r"Update (\d+) of 12, 0:00:\d\d left, loss (\d+\.5000)", line) for line in lines]
    assert all(found) and [int(line[1]) for line in found] == list(range(1, 13))
    assert [float(line[2]) for line in found] == [0.5 + step for step in range(12)]
    assert lines[-1].startswith("Update 12 of 12, 0:00:00 left")


def test_seldom(fit, tmp_path, capsys):
    fit(tmp_path, [LogProgress(seconds=60)])
    assert capsys.readouterr().err.splitlines()[-1] == "12 updates done"


def test_an_older_validation_says_its_step(fit, tmp_path, capsys, make_module):
    class Logging(make_module):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", 0.3, prog_bar=True, batch_size=4)

    fit(tmp_path, [LogProgress(seconds=60)], Logging(), check_val_every_n_epoch=2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "12 updates done: val/loss 0.3 (val/... after update 8)"
    fit(tmp_path, [LogProgress(seconds=60)], Logging())
    assert capsys.readouterr().err.splitlines()[-1] == "12 updates done: val/loss 0.3"
