"""Callbacks for the progress of a run: printed lines, and pairs and tokens per second."""

import sys
import time
from datetime import timedelta
from typing import Any

from lightning.fabric.utilities import throughput
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pacmr_lightning.batch import TrainingBatch
from pacmr_lightning.errors import UserError, check_at_least
from pacmr_lightning.modules.schedule import planned_updates


class Throughput(Callback):
    """Pairs and tokens per second in training, without validation.

    Tags: ``wall_clock/train/device/items_per_sec`` (tokens), ``samples_per_sec`` (pairs) and
    ``batches_per_sec`` (updates) of one device; the same of all devices without ``device/``. Meta-batches and
    padding do not count, and a shared prompt counts once. Files: none. Cost: 0.1 ms per update.

    Args:
        window_size: updates to average over.

    Raises:
        UserError: ``window_size`` is under 2.
    """

    def __init__(self, window_size: int = 20):
        super().__init__()
        check_at_least(2, window_size=window_size)
        self.window_size = window_size

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._totals: dict[str, Any] = {"time": 0.0, "batches": 0, "samples": 0, "lengths": 0}
        self._rates = throughput.Throughput(world_size=trainer.world_size, window_size=self.window_size)
        self._mark = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restart the clock."""
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainingBatch, *_: Any
    ) -> None:
        """Add the update, and log if it is time."""
        if not isinstance(batch, TrainingBatch):
            raise UserError("Throughput counts the pairs of a TrainingBatch; remove it from the callbacks.")
        now = time.perf_counter()
        new = {"time": now - self._mark, "batches": 1, "samples": len(batch.train)}
        new["lengths"] = batch.train.token_count
        self._totals = {name: total + new[name] for name, total in self._totals.items()}
        self._mark = now
        self._rates.update(**self._totals)
        log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if log_every and trainer.global_step % log_every == 0:
            rates = {name: value for name, value in self._rates.compute().items() if name.endswith("_sec")}
            pl_module.log_dict({f"wall_clock/train/{name}": float(value) for name, value in rates.items()})


class LogProgress(Callback):
    """Lines on standard error: updates, time left and loss at intervals, and the metrics at the end.

    ``pacmr fit`` adds it if there is no terminal for a progress bar. Tags: none. Files: none. Cost:
    microseconds per update.

    Args:
        seconds: between two lines.
    """

    def __init__(self, seconds: float = 30.0):
        super().__init__()
        self.seconds = seconds

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._start(trainer.global_step, planned_updates(trainer))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Print on rank 0 if it is time."""
        self._tell(trainer, "Update", trainer.global_step, trainer.callback_metrics.get("train/loss"))

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the number of batches, and start the clock."""
        self._start(0, int(sum(trainer.num_predict_batches)))
        if trainer.is_global_zero:
            print(f"Batches of prompts to answer: {self._planned:,}", file=sys.stderr, flush=True)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Print on rank 0 if it is time."""
        self._tell(trainer, "Batch", batch_idx + 1)

    def _start(self, first: int, planned: int) -> None:
        self._first, self._planned = first, planned
        self._began = self._printed = time.monotonic()

    def _tell(self, trainer: Trainer, what: str, done: int, loss: Tensor | None = None) -> None:
        now = time.monotonic()
        if not trainer.is_global_zero or now - self._printed < self.seconds or done == self._first:
            return
        self._printed = now
        left = timedelta(seconds=round((self._planned - done) * (now - self._began) / (done - self._first)))
        # Only here, since it waits for a GPU.
        more = "" if loss is None else f", loss {float(loss):.4f}"
        print(f"{what} {done:,} of {self._planned:,}, {left} left{more}", file=sys.stderr, flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the update of the validation metrics."""
        self._validated = trainer.global_step

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the last metrics on rank 0, and the update of their validation if it is an earlier one."""
        if trainer.is_global_zero:
            text = ", ".join(f"{name} {value:.4g}" for name, value in trainer.progress_bar_metrics.items())
            if "val/" in text and self._validated != trainer.global_step:
                text += f" (val/... after update {self._validated:,})"
            print(f"{trainer.global_step:,} updates done" + (f": {text}" if text else ""), file=sys.stderr)
