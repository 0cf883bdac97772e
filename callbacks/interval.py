"""Interval between two actions of a callback, and a time limit for pictures."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from pacmr_lightning.errors import UserError
from pacmr_lightning.ranks import max_over_ranks

SHARE = 0.02
"""Maximum share of the training time so far that pictures of all callbacks take; see ``Interval``."""


class Interval:
    """Interval between two actions of a callback, given like Lightning's ``val_check_interval``.

    Args:
        every: an integer is a number of policy updates; a float in (0, 1] is a share of the fit's updates, so
            0.1 means ten times in a run of any length; None means never.
        limited: if true and ``every`` is a share, skip actions while those of all limited callbacks have
            taken more than ``SHARE`` of the time since the fit's first update. The first of each always
            comes and does not count: it loads what the figures at the end need too. A callback stores its
            interval as ``interval``, by which the others find it.

    Raises:
        UserError: ``every`` is out of range.
    """

    def __init__(self, every: int | float | None, limited: bool = False):
        # type(), since 1 is an update and 1.0 a run.
        if every is not None and not (every >= 1 if type(every) is int else 0 < every <= 1):
            raise UserError(
                f"every is {every}, but it must be a number of policy updates from 1, a share of the run in "
                "(0, 1], such as 0.1 for ten times a run, or null for none."
            )
        self.every = every
        self.limited = limited and isinstance(every, float)
        self.restart()

    def restart(self) -> None:
        """Forget an earlier fit."""
        self.last: int | None = None
        """Policy updates done at the last action."""
        self.seconds = 0.0
        """Time of the actions of this fit after the first, on this rank."""
        self.skipped = False
        self._began: float | None = None

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether to act after the last update; all ranks call it after each, and get the same value.

        Raises UserError for a share of a run without an end.
        """
        if self._began is None:
            self._began = perf_counter()
        return self._is_reached(trainer) and not self._is_too_slow(trainer, self._began)

    @contextmanager
    def acting(self, trainer: Trainer) -> Iterator[None]:
        """Record the update and the time of an action."""
        first, self.last, began = self.last is None, trainer.global_step, perf_counter()
        yield
        self.seconds += 0 if first else perf_counter() - began

    def _is_reached(self, trainer: Trainer) -> bool:
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

    def _is_too_slow(self, trainer: Trainer, began: float) -> bool:
        if not self.limited or self.last is None:
            return False
        # Lightning sets the attribute without declaring it.
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        found = [(type(each).__name__, getattr(each, "interval", None)) for each in callbacks]
        limited = [(name, i) for name, i in found if isinstance(i, Interval) and i.limited]
        if any(interval.last == trainer.global_step for _, interval in limited):
            return False  # all pictures of an update, or none
        seconds, limit = sum(i.seconds for _, i in limited), SHARE * (perf_counter() - began)
        # Clocks of ranks differ.
        if not max_over_ranks(int(seconds > limit), trainer.strategy.root_device):
            return False
        if not any(interval.skipped for _, interval in limited):
            names = ", ".join(dict.fromkeys(name for name, _ in limited))
            rank_zero_info(
                f"{names}: fewer pictures than every {self.every:g} of the run, which would take more than "
                f"{SHARE:.0%} of the training time. The last update always has them; for more, give every "
                "as a number of updates."
            )
        self.skipped = True
        return True
