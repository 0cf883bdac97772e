"""Where demonstrations for supervised fine-tuning come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path

from datasets import Dataset

from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError

from .columns import SFT
from .prompts import completion_prompts
from .reading import made_once, read_sft
from .splits import DEFAULT_FRACTION, Split, Splits


class Completions(ABC):
    """Demonstrations, a prompt and its completion each, for training and validation."""

    name: str
    """What messages call the source."""

    @abstractmethod
    def load(self, split: Split) -> Dataset:
        """Rows as ``reading.read_sft`` makes them.

        Raises:
            UserError: the data cannot be read.
        """


class CompletionFiles(Completions):
    """Demonstrations from JSON Lines or Parquet files with the columns ``prompt`` and ``completion``.

    Args:
        train: file with the training rows (.jsonl, .json, each also with .gz, or .parquet).
        validation: file with the validation rows. None: some prompts of the training file are set aside.
        validation_fraction: share of the prompts that is set aside where there is no validation file, in (0,
            1); all rows of a prompt fall on the same side.

    Raises:
        UserError: ``validation_fraction`` is outside (0, 1), or set although there is a validation file.
    """

    def __init__(
        self, train: str, validation: str | None = None, validation_fraction: float = DEFAULT_FRACTION
    ):
        self.splits = Splits(train, validation, validation_fraction)
        self.name = Path(train).name

    def load(self, split: Split) -> Dataset:
        """Rows of the file that holds the split, or of its share of the training file."""
        rows = read_sft(self.splits.place(split))
        return self.splits.select(rows, completion_prompts, split)


class WorldCompletions(Completions):
    """Good responses of the embedded world: the best of some random ones by gold reward.

    Args:
        rows: number of training rows, at least 1.
        validation_rows: number of validation rows, at least 1.
        best_of: random responses of which the best is shown, at least 1.
        seed: seed of the world and of its rows; use that of the preference pairs.

    Raises:
        UserError: a number is below 1, or the seed is negative.
    """

    name = "embedded world"

    def __init__(self, rows: int = 40_000, validation_rows: int = 512, best_of: int = 4, seed: int = 0):
        for option, value in (("rows", rows), ("validation_rows", validation_rows), ("best_of", best_of)):
            if value < 1:
                raise UserError(f"{option} is {value}, but it must be at least 1.")
        self.world = World(seed)
        self.best_of = best_of
        self._sizes = {"train": rows, "validation": validation_rows}
        # Different seeds, or the validation rows would be the first of the training rows.
        self._seeds = {"train": 2 * seed, "validation": 2 * seed + 1}

    def load(self, split: Split) -> Dataset:
        """The split's rows."""
        size, seed = self._sizes[split], self._seeds[split]
        rows = partial(self.world.sft_rows, size, seed, self.best_of)
        key = f"{self.world.key}:{size}:{seed}:{self.best_of}"
        return made_once(rows, SFT, f"{self.name} ({split})", key)
