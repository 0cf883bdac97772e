"""Validation rows: in a place of their own, or those of some training prompts that are set aside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from datasets import Dataset

from pacmr_lightning.errors import UserError

from .hashing import unit_hash

Split = Literal["train", "validation"]
DEFAULT_FRACTION = 0.05
DEFAULT_SEED = 42


class Splits:
    """Where a split's rows are: in a place of its own, or among those of some prompts of the training rows.

    Args:
        train: what holds the training rows: a file, or a dataset's split.
        validation: what holds the validation rows. None: some prompts of the training rows are set aside.
        fraction: share of the prompts that is set aside where there is no place for validation, in (0, 1);
            all rows of a prompt fall on the same side.
        seed: which prompts are set aside.

    Raises:
        UserError: ``fraction`` is outside (0, 1), or set although validation rows have a place.
    """

    def __init__(self, train: str, validation: str | None, fraction: float, seed: int = DEFAULT_SEED):
        if not 0 < fraction < 1:
            raise UserError(f"validation_fraction is {fraction}, but it must lie in (0, 1), such as 0.05.")
        if validation is not None and fraction != DEFAULT_FRACTION:
            raise UserError(
                f"validation_fraction is {fraction}, but it has no effect beside the validation rows of "
                f"{validation}; leave one of them out."
            )
        self.train = train
        self.validation = validation
        self.fraction = fraction
        self.seed = seed

    def place(self, split: Split) -> str:
        """What holds the split's rows, perhaps among others."""
        return self.validation if split == "validation" and self.validation is not None else self.train

    def select(self, rows: Dataset, prompts: Iterable[str], split: Split) -> Dataset:
        """The split's rows among those of ``place``, whose prompts are given in the same order.

        Raises:
            UserError: no row is left.
        """
        if self.validation is not None:
            return rows
        is_validation = [unit_hash(prompt, self.seed) < self.fraction for prompt in prompts]
        kept = [i for i, aside in enumerate(is_validation) if aside == (split == "validation")]
        if not kept:
            raise UserError(
                f"No {split} rows are left of {self.train} at validation_fraction {self.fraction}; change "
                "the fraction or give validation rows."
            )
        return rows.select(kept, keep_in_memory=True)
