"""The pairs that training visited last, with their weights: a window of whole steps over all ranks."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from pacmr_lightning.errors import UserError

from .records import gathered


class LastVisits:
    """A window over the last visits of pairs, which is the same for any number of ranks.

    It holds the fewest last steps that together have at least ``window`` visits over all ranks, and of each
    of these steps all visits. Rows stay on their device until somebody asks, so that keeping them costs a
    step nothing.

    A row has the step (policy updates done before it) and ``columns`` numbers of a visit, in float32.

    Args:
        window: visits to look back on.
        columns: numbers of a visit.

    Raises:
        UserError: ``window`` is under 1.
    """

    def __init__(self, window: int, columns: int):
        if window < 1:
            raise UserError(f"window is {window}, but at least 1 pair is needed to look back on.")
        self.window = window
        self.columns = columns
        self._rows: deque[Tensor] = deque()

    def clear(self) -> None:
        """Forgets all visits."""
        self._rows.clear()

    def add(self, step: int, *columns: Tensor) -> None:
        """Takes N visits of this rank, (N,) each number of theirs; drops the steps that are out of reach."""
        first = columns[0]
        values = (torch.full_like(first, step, dtype=torch.float32), *columns)
        self._rows.append(torch.stack([v.detach().to(first.device, torch.float32) for v in values], dim=1))
        while sum(map(len, self._rows)) - len(self._rows[0]) >= self.window:
            self._rows.popleft()

    def load(self, rows: Tensor, is_global_zero: bool) -> None:
        """Goes on from the rows that ``of_all_ranks`` gave, with this number of ranks or another.

        Checkpoints of earlier versions may hold a part of their earliest step, and doubles.
        """
        self._rows.clear()
        # What counts is the union over the ranks, so rank 0 holds them, whoever visited them.
        if is_global_zero:
            self._rows.append(self._whole_steps(rows.float()))

    def of_this_rank(self, device: torch.device) -> Tensor:
        """(K, 1 + columns) the rows that this rank holds, oldest first."""
        parts = [torch.empty(0, 1 + self.columns, device=device), *(row.to(device) for row in self._rows)]
        return torch.cat(parts)

    def of_all_ranks(self, device: torch.device) -> Tensor:
        """(K, 1 + columns) the rows of the window on the CPU, oldest first; all ranks call it.

        Those of a step are in the order of their numbers: in which order and on which rank they were visited
        depends on the number of ranks.
        """
        rows = torch.cat(gathered(self.of_this_rank(device), device))
        # lexsort's last key comes first.
        return self._whole_steps(rows[np.lexsort(rows.T.flip(0).numpy())])

    def _whole_steps(self, rows: Tensor) -> Tensor:
        """Cuts the window out of rows in the order of their steps."""
        return rows[rows[:, 0] >= rows[-self.window :, 0].min()] if len(rows) else rows
