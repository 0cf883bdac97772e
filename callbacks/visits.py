"""Window over the last visits of pairs on all ranks, and a base of callbacks that use it."""

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from pacmr_lightning.errors import UserError, check_at_least
from pacmr_lightning.rewards import PairRecord
from pacmr_lightning.strategies.ranks import on_all_ranks

from .interval import Recurring


def record_of(outputs: Any) -> PairRecord:
    """Return the record of a step's pairs in ``training_step``'s output; UserError if it has none."""
    if not isinstance(outputs, Mapping) or "record" not in outputs:
        raise UserError(
            "training_step returned no 'record' of its pairs; use this callback with PreferenceModule only, "
            "or remove it from trainer.callbacks."
        )
    return outputs["record"]


class LastVisits:
    """Window over the last visits of pairs, the same for any number of ranks.

    It has whole steps: the fewest last ones with at least ``window`` visits over all ranks. A row is the step
    (updates before it) and ``columns`` values, in float32; rows stay on their device until read.
    """

    def __init__(self, window: int, columns: int):
        check_at_least(1, window=window)
        self.window = window
        self.columns = columns
        self._rows: deque[Tensor] = deque()

    def clear(self) -> None:
        """Drop all visits."""
        self._rows.clear()

    def add(self, step: int, *columns: Tensor) -> None:
        """Add N visits of this rank, (N,) per column; drop the steps that leave the window."""
        first = columns[0]
        values = (torch.full_like(first, step, dtype=torch.float32), *columns)
        self._rows.append(torch.stack([v.detach().to(first.device, torch.float32) for v in values], dim=1))
        while sum(map(len, self._rows)) - len(self._rows[0]) >= self.window:
            self._rows.popleft()

    def load(self, rows: Tensor, is_global_zero: bool) -> None:
        """Restore the rows of ``of_all_ranks``, on any number of ranks."""
        # Only the union over ranks matters, so rank 0 holds all rows.
        self._rows = deque([rows] if is_global_zero else ())

    def of_this_rank(self) -> Tensor:
        """Return the (K, 1 + columns) rows of this rank on the CPU, oldest first."""
        return torch.cat([torch.empty(0, 1 + self.columns), *(rows.cpu() for rows in self._rows)])

    def of_all_ranks(self) -> Tensor:
        """Return the (K, 1 + columns) rows on the CPU, sorted by step and values; all ranks call it."""
        rows = torch.cat(on_all_ranks([self.of_this_rank()]))
        rows = rows[np.lexsort(rows.T.flip(0).numpy())]  # lexsort's last key comes first
        return rows[rows[:, 0] >= rows[-self.window :, 0].min()] if len(rows) else rows


class VisitsCallback(Recurring):
    """Base of callbacks that process the last visits at chosen updates and at the end of the fit.

    Args:
        window: number of last visits over all ranks, in whole steps; see ``LastVisits``.
        columns: values per visit.
        every: updates between two calls of ``process``, or a share of the run; see ``Interval``.

    Raises:
        UserError: an option is out of range, or the module returns no record.
    """

    def __init__(self, window: int, columns: int, every: int | float | None = None):
        super().__init__(every)
        self._visits = LastVisits(window, columns)

    @abstractmethod
    def columns_of(self, record: PairRecord) -> Sequence[Tensor]:
        """Return the (N,) values of each column, of a step's visits."""

    @abstractmethod
    def process(self, trainer: Trainer, pl_module: Any, rows: Tensor) -> None:
        """Process the (K, 1 + columns) rows of ``LastVisits.of_all_ranks``; all ranks call it."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded after this."""
        if stage == "fit" and trainer.global_step == 0:
            self._visits.clear()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the visits of all ranks; ``state_dict`` would save those of rank 0 alone."""
        checkpoint[type(self).__name__] = {"visits": self._visits.of_all_ranks()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the visits, on any number of ranks."""
        if state := checkpoint.get(type(self).__name__):
            self._visits.load(state["visits"], trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Add the step's pairs, and process them if due."""
        # global_step already counts this update.
        self._visits.add(trainer.global_step - 1, *self.columns_of(record_of(outputs)))
        super().on_train_batch_end(trainer, pl_module, outputs)

    def look(self, trainer: Trainer, pl_module: Any) -> None:
        """Collect the visits of all ranks, and process them."""
        self.process(trainer, pl_module, self._visits.of_all_ranks())
