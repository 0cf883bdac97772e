"""Progress of a training in lines, for output that goes to a file."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from pacmr_lightning.modules.schedule import planned_updates


class LogProgress(Callback):
    """Prints every half minute how many updates are done, of how many, how long still, and the last loss.

    At the end it prints what a progress bar would show, with whole names. A bar draws nothing between two
    epochs where there is no terminal, and most runs have one epoch.

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
        """Print on rank 0 where it is time."""
        step, now = trainer.global_step, time.monotonic()
        if not trainer.is_global_zero or now - self._printed < self.seconds or step == self._first:
            return
        self._printed = now
        left = (self._planned - step) * (now - self._began) / (step - self._first)
        loss = trainer.callback_metrics.get("train/loss")
        text = f"Update {step:,} of {self._planned:,}, {timedelta(seconds=round(left))} left"
        print(text if loss is None else f"{text}, loss {loss:.4f}", file=sys.stderr, flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the update that the validation metrics are of."""
        self._validated = trainer.global_step

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the last metrics on rank 0, with the step of a validation before the last update."""
        if trainer.is_global_zero:
            found = ", ".join(f"{name} {value:.4g}" for name, value in trainer.progress_bar_metrics.items())
            if "val/" in found and self._validated != trainer.global_step:
                found += f" (val/... after update {self._validated:,})"
            print(f"{trainer.global_step:,} updates done" + (f": {found}" if found else ""), file=sys.stderr)
