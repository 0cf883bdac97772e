"""Callbacks for the progress of a run: printed lines, and pairs and tokens per second."""

import sys
import time
import warnings
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from pacmr_lightning.batch import PairBatch, TrainingBatch
from pacmr_lightning.errors import check_at_least
from pacmr_lightning.evaluation.prompt_batch import PromptBatch
from pacmr_lightning.modules.schedule import planned_updates


def pairs_in(batch: TrainingBatch | PairBatch | PromptBatch) -> int:
    """Return the number of pairs (or prompts) of a step, without its meta-batch."""
    return len(batch.train if isinstance(batch, TrainingBatch) else batch)


def tokens_in(batch: TrainingBatch | PairBatch | PromptBatch) -> int:
    """Return the number of tokens of those pairs without padding; a shared prompt counts once."""
    if isinstance(batch, PromptBatch):
        return int(batch.attention_mask.sum())
    return (batch.train if isinstance(batch, TrainingBatch) else batch).token_count


class Throughput(ThroughputMonitor):
    """Lightning's ``ThroughputMonitor`` for batches of pairs.

    Tags: ``wall_clock/train/device/items_per_sec`` (tokens), ``samples_per_sec`` (pairs) and
    ``batches_per_sec`` (steps) of one device; the same of all devices without ``device/``; rank 0's totals
    ``wall_clock/train/time`` (without validation), ``lengths`` (tokens), ``samples`` (pairs) and ``batches``.
    Meta-batches do not count. Files: none. Cost: 0.1 ms per update.

    Args:
        window_size: steps to average over; a run with fewer steps has totals only.

    Raises:
        UserError: ``window_size`` is under 2.
    """

    def __init__(self, window_size: int = 20):
        check_at_least(2, window_size=window_size)
        super().__init__(batch_size_fn=pairs_in, length_fn=tokens_in, window_size=window_size)
        # FLOPs are not measured.
        warnings.filterwarnings("ignore", message=".*you need to define a `flops_per_batch`")
        self._earlier: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded after this."""
        super().setup(trainer, pl_module, stage)
        self._earlier = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of rank 0, the only one that counts."""
        stage = RunningStage.TRAINING
        if stage not in self._throughputs or not self._throughputs[stage]._time:
            return self._earlier
        totals = {name: getattr(self, f"_{name}")[stage] for name in ("lengths", "samples", "batches")}
        return {"time": self._throughputs[stage]._time[-1], **totals}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the totals until training starts."""
        self._earlier = state_dict

    def _start(self, trainer: Trainer) -> None:
        super()._start(trainer)
        stage = trainer.state.stage
        if stage == RunningStage.TRAINING and self._earlier:
            self._t0s[stage] -= self._earlier["time"]
            for name in ("lengths", "samples", "batches"):
                getattr(self, f"_{name}")[stage] = self._earlier[name]

    def _compute(self, trainer: Trainer, iter_num: int | None = None) -> None:
        connector, stage = trainer._logger_connector, trainer.state.stage
        if not connector.should_update_logs or stage is None:
            return
        found = self._throughputs[stage].compute().items()
        metrics: dict[str, Any] = {f"wall_clock/{stage.value}/{name}": value for name, value in found}
        # Else Lightning logs a fit's validation under its batch number, among the first training steps.
        connector.log_metrics(metrics, None if trainer.state.fn == TrainerFn.FITTING else iter_num)


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
