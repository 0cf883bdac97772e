"""Where demonstrations for supervised fine-tuning come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path

from datasets import Dataset

from pacmr_lightning.embedded_world import World

from .columns import SFT
from .reading import made_once, read_sft
from .sources import check_at_least
from .splits import DEFAULT_FRACTION, RowsBySplit, Split, SplitPlaces


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


class CompletionFiles(RowsBySplit, Completions):
    """Demonstrations from JSON Lines or Parquet files with the columns ``prompt`` and ``completion``.

    Args:
        train: file with the training rows (.jsonl, .json, each also with .gz, or .parquet).
        validation: file with the validation rows. None: some prompts of the training file are set aside.
        validation_fraction: share of the prompts that is set aside where there is no validation file, in (0,
            1); all rows of a prompt fall on the same side.

    Raises:
        UserError: ``validation_fraction`` is outside (0, 1), or set although there is a validation file.
    """

    columns = SFT

    def __init__(
        self, train: str, validation: str | None = None, validation_fraction: float = DEFAULT_FRACTION
    ):
        self.splits = SplitPlaces(train, validation, validation_fraction)
        self.name = Path(train).name

    def read(self, place: str) -> Dataset:
        """Rows of a file."""
        return read_sft(place)


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
        check_at_least(1, rows=rows, validation_rows=validation_rows, best_of=best_of)
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
