"""Printed progress, and pairs and tokens per second."""

import re

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pacmr_lightning.callbacks import LogProgress, Throughput

from .conftest import Module, fit


@pytest.mark.parametrize("validation", [True, False])
def test_scalars_in_tensorboard(tmp_path, validation):
    """Tokens are those of prompts and responses, a prompt once, without meta-batches and padding."""
    logger = TensorBoardLogger(tmp_path, name="tensorboard", version="")
    limits = {} if validation else {"limit_val_batches": 0}
    fit(tmp_path, [Throughput(window_size=3)], logger=logger, val_check_interval=2, **limits)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    last = {tag.removeprefix("wall_clock/train/"): events.Scalars(tag) for tag in events.Tags()["scalars"]}
    rates = [last[f"device/{kind}_per_sec"] for kind in ("batches", "samples", "items")]
    assert [len(values) for values in rates] == [10] * 3
    updates, pairs, tokens = (values[-1].value for values in rates)
    assert (pairs, tokens) == (pytest.approx(8 * updates), pytest.approx(4.5 * pairs))


class Logging(Module):
    def training_step(self, batch, batch_idx):
        self.log("train/loss", 0.5 + self.global_step, prog_bar=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 0.3, prog_bar=True, batch_size=4)


def test_a_line_each_time(tmp_path, capsys):
    fit(tmp_path, [LogProgress(seconds=0)], Logging(), check_val_every_n_epoch=2)
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "12 updates done: train/loss 11.5, val/loss 0.3 (val/... after update 8)"
    lines = [line for line in said if line.startswith("Update")]
    found = [re.fullmatch(r"Update (\d+) of 12, 0:00:\d\d left, loss (\d+\.5000)", line) for line in lines]
    assert all(found) and [int(line[1]) for line in found] == list(range(1, 13))
    assert [float(line[2]) for line in found] == [0.5 + step for step in range(12)]
    assert lines[-1].startswith("Update 12 of 12, 0:00:00 left")


def test_seldom(tmp_path, capsys):
    fit(tmp_path, [LogProgress(seconds=60)], Logging())
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "12 updates done: train/loss 11.5, val/loss 0.3"
    assert not any(line.startswith("Update") for line in said)
    fit(tmp_path, [LogProgress(seconds=60)])
    assert capsys.readouterr().err.splitlines()[-1] == "12 updates done"
