"""Training and validation rows, from separate places or with some training prompts set aside."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from datasets import Dataset

from pacmr_lightning.errors import UserError, check_within

from .columns import Columns
from .hashing import unit_hash
from .row_values import values_of

Split = Literal["train", "validation"]
DEFAULT_FRACTION = 0.05
DEFAULT_SEED = 42


@dataclass(frozen=True)
class SplitPlaces:
    """Places of the training and validation rows."""

    train: str
    """A file, or a split of a dataset."""
    validation: str | None
    """Likewise; None sets some training prompts aside."""
    fraction: float = DEFAULT_FRACTION
    """Share of the prompts that is set aside without a validation place, in (0, 1)."""
    seed: int = DEFAULT_SEED

    def __post_init__(self) -> None:
        check_within("(0, 1)", ", such as 0.05", validation_fraction=self.fraction)
        if self.validation is not None and self.fraction != DEFAULT_FRACTION:
            raise UserError(
                f"validation_fraction is {self.fraction}, but it has no effect beside the validation rows of "
                f"{self.validation}; leave one of them out."
            )

    def place(self, split: Split) -> str:
        """Return the place with the split's rows, perhaps among others."""
        return self.validation if split == "validation" and self.validation is not None else self.train


class RowsBySplit(ABC):
    """Base class of sources with rows in ``splits``; all rows of a prompt are in the same split."""

    columns: Columns
    splits: SplitPlaces

    @abstractmethod
    def read(self, place: str) -> Dataset:
        """Return all rows of a place; raise a UserError if they cannot be read."""

    def load_all(self) -> Dataset:
        """Return all training rows, also those set aside for validation."""
        return self.read(self.splits.train)

    def load(self, split: Split) -> Dataset:
        """Return the split's rows; raise a UserError if none is left."""
        rows = self.read(self.splits.place(split))
        if self.splits.validation is not None:
            return rows
        # One prompt at a time, as all of them may not fit into memory.
        prompts = (prompt if why is None else "" for prompt, why in values_of(rows, "prompt", "reason"))
        found = np.array([unit_hash(prompt, self.splits.seed) for prompt in prompts])
        is_validation = found < self.splits.fraction
        kept = np.flatnonzero(is_validation == (split == "validation"))
        if not len(kept):
            distinct, change = len(np.unique(found)), "raise" if split == "validation" else "lower"
            other = f"{change} --data.source.validation_fraction, or " if distinct > 1 else ""
            raise UserError(
                f"No {split} rows are left of {self.splits.train} at validation_fraction "
                f"{self.splits.fraction}, by which its {distinct:,} distinct prompts are split; {other}give "
                "--data.source.validation FILE."
            )
        return rows.select(kept, keep_in_memory=True)
