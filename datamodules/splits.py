"""Training and validation rows in files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from datasets import Dataset

from pacmr_lightning.errors import UserError

from .noise import unit_hash

Split = Literal["train", "validation"]
DEFAULT_FRACTION = 0.05
_SEED = 42


class FileSplits:
    """Where a split's rows are: in a file of its own, or among those of some prompts of the training file.

    Args:
        train: file with the training rows (.jsonl, .json, each also with .gz, or .parquet).
        validation: file with the validation rows. None: some prompts of the training file are set aside.
        fraction: share of the prompts that is set aside where there is no validation file, in (0, 1); all
            rows of a prompt fall on the same side.

    Raises:
        UserError: ``fraction`` is outside (0, 1), or set although there is a validation file.
    """

    def __init__(self, train: str, validation: str | None, fraction: float):
        if not 0 < fraction < 1:
            raise UserError(f"validation_fraction is {fraction}, but it must lie in (0, 1), such as 0.05.")
        if validation is not None and fraction != DEFAULT_FRACTION:
            raise UserError(
                f"validation_fraction is {fraction}, but it has no effect beside the validation file "
                f"{validation}; leave one of them out."
            )
        self.train = train
        self.validation = validation
        self.fraction = fraction
        self.name = Path(train).name

    def path(self, split: Split) -> str:
        """The file that holds the split's rows, perhaps among others."""
        return self.validation if split == "validation" and self.validation is not None else self.train

    def select(self, rows: Dataset, prompts: Iterable[str], split: Split) -> Dataset:
        """The split's rows among those of ``path``, whose prompts are given in the same order.

        Raises:
            UserError: no row is left.
        """
        if self.validation is not None:
            return rows
        is_validation = [unit_hash(prompt, _SEED) < self.fraction for prompt in prompts]
        kept = [i for i, aside in enumerate(is_validation) if aside == (split == "validation")]
        if not kept:
            raise UserError(
                f"No {split} rows are left of {self.train} at validation_fraction {self.fraction}; change "
                "the fraction or give a validation file."
            )
        return rows.select(kept, keep_in_memory=True)
