"""Interval between two actions of a callback, and a base of callbacks that act at intervals."""

import math
from abc import abstractmethod
from typing import Any

from lightning.pytorch import Callback, Trainer

from pacmr_lightning.errors import UserError


class Interval:
    """Interval between two actions of a callback, given like Lightning's ``val_check_interval``.

    Args:
        every: an integer is a number of policy updates; a float in (0, 1] is a share of the fit's updates, so
            0.1 means ten times in a run of any length; None means never.

    Raises:
        UserError: ``every`` is out of range.
    """

    def __init__(self, every: int | float | None):
        # type(), since 1 is an update and 1.0 a run.
        if every is not None and not (every >= 1 if type(every) is int else 0 < every <= 1):
            raise UserError(
                f"every is {every}, but it must be a number of policy updates from 1, a share of the run in "
                "(0, 1], such as 0.1 for ten times a run, or null for none."
            )
        self.every = every

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether to act after the last update; UserError for a share of a run without an end."""
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


class Recurring(Callback):
    """Base of callbacks that look at a run every ``every`` updates, see ``Interval``, and at the end."""

    def __init__(self, every: int | float | None):
        super().__init__()
        self.interval = Interval(every)

    @abstractmethod
    def look(self, trainer: Trainer, pl_module: Any) -> None:
        """Act after an update; all ranks call it."""

    def is_due(self, trainer: Trainer) -> bool:
        """Return true if ``look`` is due after this update; it always comes at the end."""
        return self.interval.is_due(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Call ``look`` if due."""
        if self.is_due(trainer):
            self.look(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Call ``look`` unless it came after the last update, while the ranks can still communicate."""
        if not self.is_due(trainer):
            self.look(trainer, pl_module)
