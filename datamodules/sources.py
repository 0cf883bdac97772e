"""Sources of preference pairs, and of demonstrations for supervised fine-tuning."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from datasets import Dataset

from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError, check_at_least, check_within
from pacmr_lightning.files import local_path, unit_hash

from .cleaned import clean_file, write_cleaned
from .columns import PREFERENCES, SFT, Columns, looks_like_messages, text_of
from .reading import JSON_ENDINGS, made_once, numbered_rows, read_rows, values_of

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
        if "" in (self.train, self.validation):
            raise UserError("The source names '' as its training or validation rows; give a name, or null.")
        check_within("(0, 1)", ", such as 0.05", validation_fraction=self.fraction)
        if self.validation is not None and self.fraction != DEFAULT_FRACTION:
            raise UserError(
                f"validation_fraction is {self.fraction}, but it has no effect beside the validation rows of "
                f"{self.validation}; leave one of them out."
            )


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
        rows = self.read((split == "validation" and self.splits.validation) or self.splits.train)
        if self.splits.validation is not None:
            return rows
        # One prompt at a time, as all of them may not fit into memory.
        prompts = (prompt if why is None else "" for prompt, why in values_of(rows, "prompt", "reason"))
        hashes = np.array([unit_hash(prompt, self.splits.seed) for prompt in prompts])
        is_validation = hashes < self.splits.fraction
        kept = np.flatnonzero(is_validation == (split == "validation"))
        if not len(kept):
            distinct, change = len(np.unique(hashes)), "raise" if split == "validation" else "lower"
            other = f"{change} the source's validation_fraction, or " if distinct > 1 else ""
            raise UserError(
                f"No {split} rows are left of {self.splits.train} at validation_fraction "
                f"{self.splits.fraction}, by which its {distinct:,} distinct prompts are split; {other}give "
                "the source validation rows of its own (validation FILE, or validation_split NAME)."
            )
        return rows.select(kept, keep_in_memory=True)


class Source(ABC):
    """Base class of preference pairs; the options determine the rows, which every rank loads for itself."""

    name: str
    """Name in messages."""
    gold_reward: Callable[[str, str], float] | None = None
    """r(prompt, response) if known; ``GoldReward`` scores responses with it."""
    prompts: list[str] | None = None
    """Prompts for evaluation; None means those of the validation pairs."""

    @abstractmethod
    def load(self, split: Split) -> Dataset:
        """Return the rows of a split.

        ``reading.rows_to_dataset(rows, columns.PREFERENCES, name)`` makes them from dicts, checks them and
        makes ids. Every rank calls ``load``, the first of a machine once more before the others.

        Raises:
            UserError: the data cannot be read.
        """

    def load_all(self) -> Dataset:
        """Return all training rows, also those set aside; for ``clean_meta`` and ``audit --cleaned``."""
        return self.load("train")

    cleaned_name = "cleaned.jsonl"
    """Name of an audit's cleaned file where none is given; one that is given has its format."""

    files: tuple[str, ...] = ()
    """Own files or folder, which are not written to."""

    def refuse_own(self, option: str, output: str | Path) -> None:
        """Raise a UserError if an option names one of ``files``, or a file below such a folder."""
        path = local_path(output).resolve()
        for own in (local_path(file).resolve() for file in self.files):
            if own == path or (own.is_dir() and own in path.parents):
                raise UserError(f"{option} is {output}, where the source's own rows are; name another file.")

    def check_output(self, output: str) -> Path:
        """Return the path that ``write_cleaned`` writes to, or raise a UserError."""
        self.refuse_own("cleaned", output)
        path = local_path(output)
        endings = (".parquet",) if self.cleaned_name.endswith(".parquet") else JSON_ENDINGS
        if not path.name.endswith(endings) or path.is_dir():
            raise UserError(
                f"cleaned is {output}, but the pairs of {self.name} are written to a file ending in "
                f"{' or '.join(endings)}."
            )
        return path

    def write_cleaned(self, output: str, drop: set[str], flip: set[str]) -> int:
        """Write the rows of ``load_all``, some dropped and some with the label swapped; return their number.

        A swap exchanges ``chosen`` and ``rejected``, and the votes for them; ``flipped``, ``eta`` and
        ``p_right`` become their opposites. ``drop`` and ``flip`` are ids.

        Raises:
            UserError: the output does not fit the source, or an id is missing.
        """
        return write_cleaned(self.load_all(), self.name, self.check_output(output), drop, flip)


class Files(RowsBySplit, Source):
    """Preference pairs from JSON Lines or Parquet files.

    Args:
        train: file with the training pairs (.jsonl, .json, each also with .gz, or .parquet).
        validation: file with the validation pairs. None: some prompts of the training file are set aside.
        validation_fraction: share of the prompts set aside without a validation file, in (0, 1); all pairs of
            a prompt fall on the same side.
        reward: r(prompt, response) that the labels come from, if known: a function or a class with
            ``__call__`` of your own, by its import path.

    Raises:
        UserError: ``validation_fraction`` is outside (0, 1), or set beside a validation file.
    """

    columns = PREFERENCES

    def __init__(
        self,
        train: str,
        validation: str | None = None,
        validation_fraction: float = DEFAULT_FRACTION,
        reward: Callable[[str, str], float] | None = None,
    ):
        self.splits = SplitPlaces(train, validation, validation_fraction)
        self.name = Path(train).name
        self.files = (train, *([validation] if validation else []))
        self.cleaned_name = "cleaned.parquet" if self.name.endswith(".parquet") else "cleaned.jsonl"
        self.gold_reward = reward

    def read(self, place: str) -> Dataset:
        """Return the rows of a file."""
        return read_rows(place, PREFERENCES)

    def write_cleaned(self, output: str, drop: set[str], flip: set[str]) -> int:
        """See ``clean_file``."""
        return clean_file(self.splits.train, self.check_output(output), drop, flip)


class Prompts(Source):
    """Prompts without pairs, for ``pacmr predict``.

    Args:
        file: JSON Lines or Parquet, with a text in the column ``prompt``; other columns do not count.

    Raises:
        UserError: the file is missing or unreadable, or a prompt is no text.
    """

    def __init__(self, file: str):
        self.name, self.files = Path(file).name, (file,)
        self.prompts = []
        messages = True
        for place, row in numbered_rows(file):
            self.prompts.append(prompt := text_of(row, "prompt", place))
            messages = messages and looks_like_messages(prompt)
        if messages and self.prompts:
            raise UserError(f"{place}: 'prompt' holds chat messages, as all others, but it must be a text.")

    def load(self, split: Split) -> Dataset:
        """Raise a UserError: there are no pairs."""
        raise UserError(f"{self.name} has prompts only, for pacmr predict; name a source of pairs.")


class EmbeddedWorld(Source):
    """Pairs of the synthetic benchmark, where the gold reward and P(chosen is better) are known.

    Args:
        pairs: number of training pairs, at least 1.
        validation_pairs: number of validation pairs, at least 1.
        seed: seed of the gold rewards and of the pairs.
        pairs_seed: seed of other training pairs with the same gold reward; validation pairs and prompts stay.
            None: ``seed``.
    """

    name = "synthetic benchmark"

    def __init__(
        self, pairs: int = 6400, validation_pairs: int = 1024, seed: int = 0, pairs_seed: int | None = None
    ):
        check_at_least(1, pairs=pairs, validation_pairs=validation_pairs)
        self.world = World(seed)
        self.gold_reward = self.world.gold_reward
        self.prompts = self.world.prompts()
        self._sizes = {"train": pairs, "validation": validation_pairs}
        # Different seeds, or the validation pairs would be the first training pairs.
        self._seeds = {"train": 2 * (seed if pairs_seed is None else pairs_seed), "validation": 2 * seed + 1}

    def load(self, split: Split) -> Dataset:
        """Return the split's pairs."""
        size, seed = self._sizes[split], self._seeds[split]
        rows = partial(self.world.preference_rows, size, seed)
        return made_once(rows, PREFERENCES, f"{self.name} ({split})", f"{self.world.key}:{size}:{seed}")


class Completions(ABC):
    """Base class of demonstrations, a prompt and its completion each."""

    name: str

    @abstractmethod
    def load(self, split: Split) -> Dataset:
        """Return the rows of a split, as ``reading.read_rows`` does with ``columns.SFT``."""


class CompletionFiles(RowsBySplit, Completions):
    """Demonstrations from JSON Lines or Parquet files with the columns ``prompt`` and ``completion``.

    Args:
        train: file with the training rows (.jsonl, .json, each also with .gz, or .parquet).
        validation: file with the validation rows. None: some prompts of the training file are set aside.
        validation_fraction: share of the prompts set aside without a validation file, in (0, 1); all rows of
            a prompt fall on the same side.
    """

    columns = SFT

    def __init__(
        self, train: str, validation: str | None = None, validation_fraction: float = DEFAULT_FRACTION
    ):
        self.splits = SplitPlaces(train, validation, validation_fraction)
        self.name = Path(train).name

    def read(self, place: str) -> Dataset:
        """Return the rows of a file."""
        return read_rows(place, SFT)


class WorldCompletions(Completions):
    """Good responses of the synthetic benchmark: the best of some random ones by gold reward.

    Args:
        rows: number of training rows, at least 1.
        validation_rows: number of validation rows, at least 1.
        best_of: random responses of which the best is shown, at least 1.
        seed: seed of the gold rewards and of the rows; use that of the preference pairs.
    """

    name = "synthetic benchmark"

    def __init__(self, rows: int = 40_000, validation_rows: int = 512, best_of: int = 4, seed: int = 0):
        check_at_least(1, rows=rows, validation_rows=validation_rows, best_of=best_of)
        self.world = World(seed)
        self.best_of = best_of
        self._sizes = {"train": rows, "validation": validation_rows}
        # Different seeds, or the validation rows would be the first training rows.
        self._seeds = {"train": 2 * seed, "validation": 2 * seed + 1}

    def load(self, split: Split) -> Dataset:
        """Return the split's rows."""
        size, seed = self._sizes[split], self._seeds[split]
        rows = partial(self.world.sft_rows, size, seed, self.best_of)
        key = f"{self.world.key}:{size}:{seed}:{self.best_of}"
        return made_once(rows, SFT, f"{self.name} ({split})", key)
