"""Checkpoints at chosen steps, to look at later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from pacmr_lightning.errors import UserError
from pacmr_lightning.runs.folder import CHECKPOINTS


class Snapshots(Callback):
    """Keeps the checkpoints ``checkpoints/snapshot-STEP.ckpt`` of chosen policy updates.

    Lightning's ``ModelCheckpoint`` keeps every n-th step or the best ones; the paper looks at VNet after 500,
    1000 and 2000 updates (appendix I) and at the end, which ``checkpoints/last.ckpt`` holds, and which is not
    kept twice. They are saved when the next update begins: all has been done about the one that is saved.

    Args:
        steps: policy updates after which a checkpoint is kept, each at least 1.

    Raises:
        UserError: there is no step, or one is under 1.
    """

    def __init__(self, steps: list[int]):
        super().__init__()
        if not steps or min(steps) < 1:
            raise UserError(f"steps is {steps}, but snapshots need steps of at least 1, such as [500, 1000].")
        self.steps = set(steps)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Saves what the last update has led to; all ranks take part."""
        if trainer.global_step in self.steps:
            folder = Path(trainer.default_root_dir) / CHECKPOINTS
            trainer.save_checkpoint(folder / f"snapshot-{trainer.global_step}.ckpt", weights_only=False)
