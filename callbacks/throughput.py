"""Pairs and tokens a second, by Lightning's own monitor."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from pacmr_lightning.batch import PairBatch, PairedBatch
from pacmr_lightning.errors import check_at_least
from pacmr_lightning.evaluation.prompt_batch import PromptBatch


def pairs_in(batch: PairedBatch | PairBatch | PromptBatch) -> int:
    """Pairs (or prompts) of the step; the pairs of a VNet update are not among them."""
    return len(batch.train if isinstance(batch, PairedBatch) else batch)


def tokens_in(batch: PairedBatch | PairBatch | PromptBatch) -> int:
    """Tokens of those pairs, padding left out; a prompt that two responses share counts once."""
    if isinstance(batch, PromptBatch):
        return int(batch.attention_mask.sum())
    return (batch.train if isinstance(batch, PairedBatch) else batch).token_count


class Throughput(ThroughputMonitor):
    """Lightning's ``ThroughputMonitor`` for batches of pairs.

    Logs every ``log_every_n_steps`` steps: ``train/device/items_per_sec`` (tokens a second),
    ``train/device/samples_per_sec`` (pairs a second) and ``train/device/batches_per_sec`` (steps a second)
    of one device; ``train/time``, ``train/lengths`` (tokens), ``train/samples`` (pairs) and
    ``train/batches``, in total and on rank 0; and, with several ranks, ``train/items_per_sec``,
    ``train/samples_per_sec`` and ``train/batches_per_sec`` of all of them. ``validate/...`` likewise.
    Validation does not count as training time. A VNet update's time does, its meta pairs do not. Totals go on
    counting after a resume.

    Args:
        window_size: steps to average over; the rates appear once that many have been done.

    Raises:
        UserError: ``window_size`` is under 2.
    """

    def __init__(self, window_size: int = 20):
        check_at_least(2, window_size=window_size)
        super().__init__(batch_size_fn=pairs_in, length_fn=tokens_in, window_size=window_size)
        # Its FLOPs are an extra that preference runs do not ask for.
        warnings.filterwarnings("ignore", message=".*you need to define a `flops_per_batch`")
        self._earlier: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets an earlier run; a checkpoint is loaded after this."""
        super().setup(trainer, pl_module, stage)
        self._earlier = {}

    def state_dict(self) -> dict[str, Any]:
        """Totals of rank 0, which alone counts."""
        stage = RunningStage.TRAINING
        if stage not in self._throughputs or not self._throughputs[stage]._time:
            return self._earlier
        totals = {name: getattr(self, f"_{name}")[stage] for name in ("lengths", "samples", "batches")}
        return {"time": self._throughputs[stage]._time[-1], **totals}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps them until training starts."""
        self._earlier = state_dict

    def _start(self, trainer: Trainer) -> None:
        super()._start(trainer)
        stage = trainer.state.stage
        if stage == RunningStage.TRAINING and self._earlier:
            self._t0s[stage] -= self._earlier["time"]
            for name in ("lengths", "samples", "batches"):
                getattr(self, f"_{name}")[stage] = self._earlier[name]

    def _compute(self, trainer: Trainer, iter_num: int | None = None) -> None:
        # Lightning logs a fit's validation under the number of its batch, among the first training steps.
        super()._compute(trainer, None if trainer.state.fn == TrainerFn.FITTING else iter_num)
