"""Training and validation rows: from places of their own, or some training prompts set aside."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from datasets import Dataset, Features, Value

from pacmr_lightning.errors import UserError

from .columns import Columns
from .hashing import unit_hash

Split = Literal["train", "validation"]
DEFAULT_FRACTION = 0.05
DEFAULT_SEED = 42
_LAYOUT = 2
"""Part of the cache's key; raised whenever the same rows have other prompts."""


@dataclass(frozen=True)
class SplitPlaces:
    """Where the rows of training and validation are.

    Raises:
        UserError: ``fraction`` is outside (0, 1), or set although validation rows have a place.
    """

    train: str
    """A file, or a dataset's split."""
    validation: str | None
    """Likewise. None: some prompts of the training rows are set aside."""
    fraction: float = DEFAULT_FRACTION
    """Share of the prompts that is set aside where there is no place for validation, in (0, 1)."""
    seed: int = DEFAULT_SEED
    """Which prompts are set aside."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise UserError(
                f"validation_fraction is {self.fraction}, but it must lie in (0, 1), such as 0.05."
            )
        if self.validation is not None and self.fraction != DEFAULT_FRACTION:
            raise UserError(
                f"validation_fraction is {self.fraction}, but it has no effect beside the validation rows of "
                f"{self.validation}; leave one of them out."
            )

    def place(self, split: Split) -> str:
        """What holds the split's rows, perhaps among others."""
        return self.validation if split == "validation" and self.validation is not None else self.train


class RowsBySplit(ABC):
    """Base of sources whose rows are in ``splits``; all rows of a prompt fall on the same side."""

    columns: Columns
    splits: SplitPlaces

    @abstractmethod
    def read(self, place: str) -> Dataset:
        """All rows of a place.

        Raises:
            UserError: they cannot be read.
        """

    def load_all(self) -> Dataset:
        """The training rows, also those that ``load`` sets aside for validation."""
        return self.read(self.splits.train)

    def load(self, split: Split) -> Dataset:
        """The split's rows.

        Raises:
            UserError: they cannot be read, or none is left.
        """
        rows = self.read(self.splits.place(split))
        if self.splits.validation is not None:
            return rows
        key = f"{_LAYOUT}:{self.columns.kind}:{rows._fingerprint}:{self.splits.seed}"
        # A number a row in datasets' cache: a second start does not read the texts.
        hashes = rows.map(
            _prompt_hashes,
            batched=True,
            fn_kwargs={"columns": self.columns, "seed": self.splits.seed},
            remove_columns=rows.column_names,
            features=Features({"hash": Value("float64")}),
            new_fingerprint=hashlib.sha256(key.encode()).hexdigest()[:16],
            desc="Splitting",
        )
        is_validation = hashes.with_format("numpy")["hash"][:] < self.splits.fraction
        kept = np.flatnonzero(is_validation == (split == "validation"))
        if not len(kept):
            raise UserError(
                f"No {split} rows are left of {self.splits.train} at validation_fraction "
                f"{self.splits.fraction}; change the fraction or give validation rows."
            )
        return rows.select(kept, keep_in_memory=True)


def _prompt_hashes(rows: dict[str, list[Any]], columns: Columns, seed: int) -> dict[str, list[float]]:
    """What ``Dataset.map`` calls: each row's prompt as a number in [0, 1)."""
    return {"hash": [unit_hash(row.prompt, seed) for row in columns.divided(rows)]}
