"""Validation rows: in a place of their own, or those of some training prompts that are set aside."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from datasets import Dataset, Features, Value

from pacmr_lightning.errors import UserError

from .hashing import unit_hash

Split = Literal["train", "validation"]
_LAYOUT = 1
"""Part of the cache's key; raised whenever the same rows have other prompts."""
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

    def select(
        self, rows: Dataset, prompts: Callable[[dict[str, list[Any]]], list[str]], split: Split
    ) -> Dataset:
        """The split's rows among those of ``place``.

        Args:
            rows: those of ``place``.
            prompts: the prompts of a batch of rows, by column; a function of ``prompts.py``.
            split: which part of them.

        Raises:
            UserError: no row is left.
        """
        if self.validation is not None:
            return rows
        key = f"{_LAYOUT}:{prompts.__name__}:{rows._fingerprint}:{self.seed}"
        # A number a row in datasets' cache: a second start does not read the texts.
        places = rows.map(
            _places,
            batched=True,
            fn_kwargs={"prompts": prompts, "seed": self.seed},
            remove_columns=rows.column_names,
            features=Features({"place": Value("float64")}),
            new_fingerprint=hashlib.sha256(key.encode()).hexdigest()[:16],
            desc="Splitting",
        )
        is_validation = places.with_format("numpy")["place"][:] < self.fraction
        kept = np.flatnonzero(is_validation == (split == "validation"))
        if not len(kept):
            raise UserError(
                f"No {split} rows are left of {self.train} at validation_fraction {self.fraction}; change "
                "the fraction or give validation rows."
            )
        return rows.select(kept, keep_in_memory=True)


def _places(
    rows: dict[str, list[Any]], prompts: Callable[[dict[str, list[Any]]], list[str]], seed: int
) -> dict[str, list[float]]:
    """What ``Dataset.map`` calls: each row's place in [0, 1)."""
    return {"place": [unit_hash(prompt, seed) for prompt in prompts(rows)]}
