"""Where preference pairs come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from datasets import Dataset

from pacmr_lightning.errors import UserError
from pacmr_lightning.world import World

from .noise import unit_hash
from .prompts import split_prompt
from .reading import PREFERENCES, read_preferences, rows_to_dataset

_SPLIT_SEED = 42


class Source(ABC):
    """Preference pairs for training and validation."""

    name: str
    """What messages call the source."""
    gold_reward: Callable[[str, str], float] | None = None
    """r(prompt, response) where the truth is known, else None."""
    prompts: list[str] | None = None
    """Prompts to answer when the policy is evaluated; None means those of the validation pairs."""

    @abstractmethod
    def load(self, split: Literal["train", "validation"]) -> Dataset:
        """Rows as ``reading.read_preferences`` makes them.

        Raises:
            UserError: the data cannot be read.
        """


class Files(Source):
    """Preference pairs from JSON Lines or Parquet files.

    Args:
        train: file with the training pairs (.jsonl, .json, each also with .gz, or .parquet).
        validation: file with the validation pairs. None: some prompts of the training file are set aside.
        validation_fraction: share of the prompts that is set aside where there is no validation file, in (0,
            1); all pairs of a prompt fall on the same side.

    Raises:
        UserError: ``validation_fraction`` is outside (0, 1), or set although there is a validation file.
    """

    def __init__(self, train: str, validation: str | None = None, validation_fraction: float = 0.05):
        if not 0 < validation_fraction < 1:
            raise UserError(
                f"validation_fraction is {validation_fraction}, but it must lie in (0, 1), such as 0.05."
            )
        if validation is not None and validation_fraction != 0.05:
            raise UserError(
                f"validation_fraction is {validation_fraction}, but it has no effect beside the validation "
                f"file {validation}; leave one of them out."
            )
        self.train = train
        self.validation = validation
        self.validation_fraction = validation_fraction
        self.name = Path(train).name

    def load(self, split: Literal["train", "validation"]) -> Dataset:
        """Rows of the file that holds the split, or of its share of the training file."""
        if self.validation is not None:
            return read_preferences(self.train if split == "train" else self.validation)
        rows = read_preferences(self.train)
        validation = [
            unit_hash(prompt, _SPLIT_SEED) < self.validation_fraction
            for prompt in map(_prompt, rows["prompt"], rows["chosen"], rows["rejected"])
        ]
        kept = [i for i, is_validation in enumerate(validation) if is_validation == (split == "validation")]
        if not kept:
            raise UserError(
                f"No {split} pairs are left of {self.train} at validation_fraction "
                f"{self.validation_fraction}; change the fraction or give a validation file."
            )
        return rows.select(kept, keep_in_memory=True)


def _prompt(prompt: str | None, chosen: str, rejected: str) -> str:
    # An unusable row has the empty prompt here; it is dropped and counted later, on whichever side it falls.
    return split_prompt(chosen, rejected).prompt if prompt is None else prompt


class EmbeddedWorld(Source):
    """Pairs of a generated preference world, in which the gold reward and P(chosen is better) are known.

    Args:
        pairs: number of training pairs, at least 1.
        validation_pairs: number of validation pairs, at least 1.
        seed: seed of the world and of its pairs.

    Raises:
        UserError: a number of pairs is below 1.
    """

    name = "embedded world"

    def __init__(self, pairs: int = 6400, validation_pairs: int = 1024, seed: int = 0):
        for option, value in (("pairs", pairs), ("validation_pairs", validation_pairs)):
            if value < 1:
                raise UserError(f"{option} is {value}, but at least 1 pair is needed.")
        self.world = World(seed)
        self.gold_reward = self.world.gold_reward
        self.prompts = self.world.prompts()
        self._sizes = {"train": pairs, "validation": validation_pairs}
        # Different seeds, or the validation pairs would be the first of the training pairs.
        self._seeds = {"train": 2 * seed, "validation": 2 * seed + 1}

    def load(self, split: Literal["train", "validation"]) -> Dataset:
        """The split's pairs, generated anew (in memory: that is faster than a cache)."""
        rows = self.world.preference_rows(self._sizes[split], self._seeds[split])
        return rows_to_dataset(rows, PREFERENCES, f"{self.name} ({split})")
