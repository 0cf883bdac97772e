"""Callbacks for the progress of a run: printed lines, and pairs and tokens per second."""

import sys
import time
from datetime import timedelta
from typing import Any

from lightning.fabric.utilities import throughput
from lightning.pytorch import Callback, LightningModule, Trainer

from pacmr_lightning.batch import TrainingBatch
from pacmr_lightning.errors import check_at_least
from pacmr_lightning.modules.schedule import planned_updates


class Throughput(Callback):
    """Pairs and tokens per second in training, without validation.

    Tags: ``wall_clock/train/device/items_per_sec`` (tokens), ``samples_per_sec`` (pairs) and
    ``batches_per_sec`` (updates) of one device; the same of all devices without ``device/``; rank 0's totals
    ``wall_clock/train/time``, ``lengths`` (tokens), ``samples`` (pairs) and ``batches``. Meta-batches and
    padding do not count, and a shared prompt counts once. Files: none. Cost: 0.1 ms per update.

    Args:
        window_size: updates to average over; a run with fewer has totals only.

    Raises:
        UserError: ``window_size`` is under 2.
    """

    def __init__(self, window_size: int = 20):
        super().__init__()
        check_at_least(2, window_size=window_size)
        self.window_size = window_size
        self._totals: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded after this."""
        self._totals = {"time": 0.0, "batches": 0, "samples": 0, "lengths": 0}

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of rank 0, the only one that counts."""
        return self._totals

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the totals."""
        self._totals = dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._rates = throughput.Throughput(world_size=trainer.world_size, window_size=self.window_size)
        self._mark = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restart the clock."""
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainingBatch, *_: Any
    ) -> None:
        """Add the update, and log if it is time."""
        now = time.perf_counter()
        new = {"time": now - self._mark, "batches": 1, "samples": len(batch.train)}
        new["lengths"] = batch.train.token_count
        self._totals = {name: total + new[name] for name, total in self._totals.items()}
        self._mark = now
        self._rates.update(**self._totals)
        # Lightning sets the attribute without declaring it.
        log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if log_every and trainer.global_step % log_every == 0:
            found = {f"wall_clock/train/{name}": float(v) for name, v in self._rates.compute().items()}
            pl_module.log_dict(found)


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
        self._planned = planned_updates(trainer)
        self._first = trainer.global_step
        self._began = self._printed = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Print on rank 0 if it is time."""
        step, now = trainer.global_step, time.monotonic()
        if not trainer.is_global_zero or now - self._printed < self.seconds or step == self._first:
            return
        self._printed = now
        left = (self._planned - step) * (now - self._began) / (step - self._first)
        loss = trainer.callback_metrics.get("train/loss")
        text = f"Update {step:,} of {self._planned:,}, {timedelta(seconds=round(left))} left"
        print(text if loss is None else f"{text}, loss {loss:.4f}", file=sys.stderr, flush=True)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the number of batches, and start the clock."""
        self._batches = int(sum(trainer.num_predict_batches))
        self._began = self._printed = time.monotonic()
        if trainer.is_global_zero:
            batches = f"{self._batches:,} batch{'es' * (self._batches != 1)}"
            print(
                f"Generating responses to {batches} of prompts ...",
                file=sys.stderr,
                flush=True,
            )

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Print on rank 0 if it is time."""
        done, now = batch_idx + 1, time.monotonic()
        if trainer.is_global_zero and now - self._printed >= self.seconds:
            self._printed = now
            left = timedelta(seconds=round((self._batches - done) * (now - self._began) / done))
            print(f"Batch {done:,} of {self._batches:,}, {left} left", file=sys.stderr, flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the update of the validation metrics."""
        self._validated = trainer.global_step

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the last metrics on rank 0, and the update of their validation if it is an earlier one."""
        if trainer.is_global_zero:
            found = ", ".join(f"{name} {value:.4g}" for name, value in trainer.progress_bar_metrics.items())
            if "val/" in found and self._validated != trainer.global_step:
                found += f" (val/... after update {self._validated:,})"
            print(f"{trainer.global_step:,} updates done" + (f": {found}" if found else ""), file=sys.stderr)
