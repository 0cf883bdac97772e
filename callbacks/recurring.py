"""Bases of callbacks that look at a run at intervals, some of them at the last visits of its pairs."""

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pacmr_lightning.errors import UserError, check_at_least
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.rewards import PairRecord
from pacmr_lightning.strategies.ranks import on_all_ranks


def check_module(callback: Callback, pl_module: LightningModule) -> None:
    """Raise UserError for a module other than ``PreferenceModule``."""
    if not isinstance(pl_module, PreferenceModule):
        raise UserError(f"{type(callback).__name__} is for PreferenceModule; remove it from the callbacks.")


class Recurring(Callback):
    """Base of callbacks that look at a run at intervals, as its validation does, and at the end.

    Args:
        every: as Lightning's ``val_check_interval``: an integer is a number of policy updates; a float in
            (0, 1] is a share of the fit's updates, 0.1 for ten times in any run; None means never.
    """

    def __init__(self, every: int | float | None):
        super().__init__()
        # type(), since 1 is an update and 1.0 a run.
        if every is not None and not (every >= 1 if type(every) is int else 0 < every <= 1):
            raise UserError(
                f"every is {every}, but it must be a number of policy updates from 1, a share of the run in "
                "(0, 1], such as 0.1 for ten times a run, or null for none."
            )
        self.every = every

    @abstractmethod
    def look(self, trainer: Trainer, pl_module: Any) -> None:
        """Act after an update; all ranks call it."""

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether ``look`` is due after this update; UserError for a share of a run without an end."""
        if not isinstance(self.every, float):
            return self.every is not None and trainer.global_step % self.every == 0
        if math.isinf(trainer.estimated_stepping_batches):
            raise UserError(
                f"every is {self.every}, a share of the run, but the run has no end; set trainer.max_epochs "
                "or trainer.max_steps, or give every as a number of updates."
            )
        between = self.every * trainer.estimated_stepping_batches
        # Rounded, so that ten tenths are a whole.
        steps = (trainer.global_step, trainer.global_step - 1)
        done, before = (math.floor(round(step / between, 9)) for step in steps)
        return done > before

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Call ``look`` if due."""
        if self.is_due(trainer):
            self.look(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Call ``look`` unless it came after the last update, while the ranks can still communicate."""
        if not self.is_due(trainer):
            self.look(trainer, pl_module)


def record_of(outputs: Any) -> PairRecord:
    """Return the record of a step's pairs in ``training_step``'s output; UserError if it has none."""
    if not isinstance(outputs, Mapping) or "record" not in outputs:
        raise UserError(
            "training_step returned no 'record' of its pairs; use this callback with PreferenceModule only, "
            "or remove it from trainer.callbacks."
        )
    return outputs["record"]


class VisitsCallback(Recurring):
    """Base of callbacks that process the last visits of pairs at chosen updates and at the end of the fit.

    The visits are those of whole steps, the fewest last ones with at least ``window`` over all ranks; so they
    are the same for any number of ranks.

    Args:
        window: number of last visits over all ranks, in whole steps.
        every: updates between two calls of ``process``, or a share of the run; see ``Recurring``.

    Raises:
        UserError: an option is out of range, or the module returns no record.
    """

    def __init__(self, window: int, every: int | float | None = None):
        super().__init__(every)
        check_at_least(1, window=window)
        self.window = window
        self._visits: deque[Tensor] = deque()
        """(N, 5) rows of each step: updates before it, u, Delta, weight and flipped, in float32."""

    @abstractmethod
    def process(self, trainer: Trainer, pl_module: Any, rows: Tensor) -> None:
        """Process K visits, rows of step, u, Delta, weight and flipped; all ranks call it."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded after this."""
        if stage == "fit" and trainer.global_step == 0:
            self._visits.clear()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the visits of all ranks; ``state_dict`` would save those of rank 0 alone."""
        checkpoint[type(self).__name__] = {"visits": self._of_all_ranks()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the visits, on any number of ranks."""
        if state := checkpoint.get(type(self).__name__):
            # Only the union over ranks matters, so rank 0 holds all rows.
            self._visits = deque([state["visits"]] if trainer.is_global_zero else ())

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Add the step's pairs, and process them if due."""
        # global_step already counts this update.
        self.add(trainer.global_step - 1, record_of(outputs))
        super().on_train_batch_end(trainer, pl_module, outputs)

    def look(self, trainer: Trainer, pl_module: Any) -> None:
        """Collect the visits of all ranks, and process them."""
        self.process(trainer, pl_module, self._of_all_ranks())

    def add(self, step: int, record: PairRecord) -> None:
        """Add this rank's visits of a step; drop the steps that leave the window."""
        u, device = record.u, record.u.device
        steps = torch.full_like(u, step, dtype=torch.float32)
        columns = (steps, u, record.delta, record.weight, record.flipped)
        # They stay on their device until they are read.
        self._visits.append(torch.stack([c.detach().to(device, torch.float32) for c in columns], dim=1))
        while sum(map(len, self._visits)) - len(self._visits[0]) >= self.window:
            self._visits.popleft()

    def of_this_rank(self) -> Tensor:
        """Return the (K, 5) rows of this rank on the CPU, oldest first."""
        return torch.cat([torch.empty(0, 5), *(rows.cpu() for rows in self._visits)])

    def _of_all_ranks(self) -> Tensor:
        """Return the (K, 5) rows on the CPU, sorted by step and values; all ranks call it."""
        rows = torch.cat(on_all_ranks([self.of_this_rank()]))
        rows = rows[np.lexsort(rows.T.flip(0).numpy())]  # lexsort's last key comes first
        return rows[rows[:, 0] >= rows[-self.window :, 0].min()] if len(rows) else rows
