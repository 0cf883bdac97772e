"""Base of callbacks that draw the pairs visited last, after chosen policy updates and at the end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pacmr_lightning.analysis.surface import Visits
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import save_figure
from pacmr_lightning.runs.folder import ANALYSIS
from pacmr_lightning.weighting.features import PAPER

from .last_visits import LastVisits
from .records import record_of
from .to_loggers import log_figure

if TYPE_CHECKING:  # drawing is imported when there is something to draw
    from matplotlib.figure import Figure


class VisitFigures(Callback):
    """Keeps the last visits, and gathers them at its steps only, so that others cost nothing.

    Args:
        steps: policy updates after which ``look`` is called, each at least 1; the end of the fit always is
            one more.
        window: visits that it looks back on, over all ranks, in whole steps; see ``LastVisits``.

    Raises:
        UserError: a step or ``window`` is under 1; or, at the first step, the module returns no record.
    """

    files: tuple[str, ...]
    """Names of its files in RUN/analysis, without ``-step-NNNNN`` and ending."""

    def __init__(self, steps: Sequence[int] | None, window: int):
        super().__init__()
        if steps and min(steps) < 1:
            raise UserError(f"steps is {list(steps)}, but policy updates count from 1.")
        self.steps = frozenset(steps or ())
        self._names: tuple[str, ...] = ()
        self._visits = LastVisits(window, columns=6)
        self._looked_at = 0

    @abstractmethod
    def look(
        self, trainer: Trainer, pl_module: LightningModule, visits: Visits, a: Tensor, b: Tensor
    ) -> None:
        """Shows the visits, on rank 0 only.

        Args:
            trainer: at ``global_step`` policy updates.
            pl_module: the module.
            visits: N finite ones, oldest first.
            a: (N,) their slopes on the CPU, NaN where the weighting has none.
            b: (N,) their offsets.
        """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets an earlier run; a checkpoint is loaded after this."""
        # Of a VNet that looks at more than (Delta, u) the visits have the features too.
        names = tuple(getattr(getattr(pl_module, "vnet", None), "features", PAPER))
        self._names = () if names == PAPER else names
        self._visits.columns = 6 + len(self._names)
        if stage == "fit" and trainer.global_step == 0:
            self._visits.clear()
            self._looked_at = 0

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the visits of all ranks; ``state_dict`` would save those of rank 0 alone."""
        checkpoint[type(self).__name__] = self._visits.of_all_ranks(trainer.strategy.root_device)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Goes on from a checkpoint, with this number of ranks or another."""
        self._visits.clear()
        if type(self).__name__ in checkpoint:
            self._visits.load(checkpoint[type(self).__name__], trainer.is_global_zero)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drops the files of the steps that this fit is going to do."""
        if not trainer.is_global_zero:
            return
        for name in self.files:
            for path in (Path(trainer.default_root_dir) / ANALYSIS).glob(f"{name}-step-*.*"):
                step = path.stem.removeprefix(f"{name}-step-")
                if step.isdecimal() and int(step) > trainer.global_step:
                    path.unlink()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes the step's pairs, and looks where it is one of the steps."""
        record = record_of(outputs)
        unknown = torch.full_like(record.u, torch.nan)
        a, b = (unknown if column is None else column for column in (record.a, record.b))
        features = () if record.features is None else record.features.unbind(1)
        columns = (record.u, record.delta, record.weight, record.flipped, a, b, *features)
        # global_step has counted this step's policy update already.
        self._visits.add(trainer.global_step - 1, *columns)
        if trainer.global_step in self.steps:
            self._look(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at the end, unless that was one of the steps."""
        if self._looked_at != trainer.global_step:
            self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._looked_at = trainer.global_step
        rows = self._visits.of_all_ranks(trainer.strategy.root_device)
        # All numbers but the step, and a and b, which may be unknown.
        rows = rows[torch.cat([rows[:, 1:5], rows[:, 7:]], dim=1).isfinite().all(dim=1)]
        if len(rows) and trainer.is_global_zero:
            _, u, delta, weight, flipped, a, b, *features = rows.unbind(1)
            visits = Visits(u.numpy(), delta.numpy(), weight.numpy(), flipped.numpy().astype(np.int8))
            visits.features = {n: column.numpy() for n, column in zip(self._names, features, strict=True)}
            self.look(trainer, pl_module, visits, a, b)


def publish(trainer: Trainer, figure: Figure, name: str, tag: str) -> None:
    """Writes ``analysis/NAME-step-NNNNN.png`` and .pdf, and gives the figure to the loggers; on rank 0."""
    path = Path(trainer.default_root_dir) / ANALYSIS / f"{name}-step-{trainer.global_step:05d}"
    save_figure(figure, path)
    log_figure(trainer, tag, figure)
