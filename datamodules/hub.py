"""Preference pairs and demonstrations from Hugging Face Hub datasets or folders in their layout."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
from datasets import Dataset, DownloadManager, Features, Value, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetGenerationError
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.csv.csv import CsvConfig
from datasets.packaged_modules.json.json import JsonConfig
from datasets.packaged_modules.parquet.parquet import ParquetConfig

from pacmr_lightning.errors import UserError, check_is, first_line
from pacmr_lightning.evaluation.answer_store import content_key
from pacmr_lightning.files import content_digest, expanded, is_file_of_rows
from pacmr_lightning.policy.hub_access import locate

from .cleaned import write_cleaned
from .columns import PREFERENCES, SFT, Columns
from .reading import SplitRows, numbered_rows, written_once
from .sources import DEFAULT_FRACTION, Completions, Files, RowsBySplit, Source, SplitPlaces

_TEXTS = ("id", *PREFERENCES.responses, *SFT.responses, "prompt", "augmented_prompt", "category", "annotator")


def load_split(
    path: str, split: str, subset: str | None = None, folder: str | None = None, texts: Sequence[str] = _TEXTS
) -> SplitRows:
    """Return a split of a Hub dataset or of a folder in its layout; ``folder`` is a ``data_dir`` in it.

    The columns ``texts`` stay what they are in the file: ``datasets`` would read dates in JSON, and numbers,
    dates and truth values in CSV.
    """
    path = expanded(path)
    *owner, last = path.split("/")
    its_cache = "___".join([*owner, camelcase_to_snakecase(last)])
    read = locate(path, "dataset", Path(datasets.config.HF_DATASETS_CACHE, its_cache))
    # datasets compares local files by their time only, so the cache is named by content.
    content = content_digest(read) if Path(read).is_dir() else None
    read = read if content is None else os.path.abspath(read)  # datasets takes json for its own loader
    cache = None if content is None else Path(datasets.config.HF_DATASETS_CACHE) / "pacmr-folders" / content
    options: dict[str, Any] = {"name": subset, "data_dir": folder, "cache_dir": cache and str(cache)}
    where = path + "".join(f", {part}" for part in (subset, folder) if part)
    key = None if content is None else content_key(content, subset, folder, split)[:16]
    place = f"{path} {split}" if folder is None else folder
    try:
        at = Path(read, folder or "")
        if subset is None and any((at / name).is_file() for name in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(str(at))  # as save_to_disk writes it
            splits = {"train": saved} if isinstance(saved, Dataset) else saved
            sizes = {name: len(rows) for name, rows in splits.items()}
            parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
            some = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
            return SplitRows.of_dataset(place, datasets.concatenate_datasets(some).with_format(None), key)
        config = load_dataset_builder(read, **options).config
        given = config.data_files or {}
        names = re.sub(r"\[.*?\]", "", split).split("+")  # of train[:3]+test
        files = {name: list(given[name]) for name in names if name in given}
        if key is not None and split in files and all(_as_written(config, file) for file in files[split]):
            return SplitRows.of_files(files[split], key)
        if isinstance(config, CsvConfig):
            options |= _texts_of_csv(config, [*chain(*files.values())])
            if key is not None:  # other splits may have other columns
                read = "csv"
                options |= {"name": None, "data_dir": None, "data_files": files or {split: []}}
        dataset = load_dataset(read, split=split, **options)
    except (DatasetGenerationError, OSError, KeyError, ValueError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        raise UserError(
            f"The split {split!r} of the dataset {where} cannot be loaded ({first_line(cause)}); give a Hub "
            "id or a folder, a subset and a split that exist, or fetch it again if it is broken."
        ) from None
    for name, feature in dataset.features.items() if isinstance(config, JsonConfig) else ():
        if name in texts and "timestamp" in str(feature):
            raise UserError(
                f"{where} has the column {name!r}, whose texts the library datasets reads as dates; give "
                "a whole split of one JSON object a line (of the Hub: hf download --repo-type dataset)."
            )
    return SplitRows.of_dataset(place, dataset, key)


def _as_written(config: Any, file: str) -> bool:
    """Return whether this package can read the file itself, without changes by ``datasets``."""
    if isinstance(config, ParquetConfig):
        return file.endswith(".parquet")
    if not isinstance(config, JsonConfig) or config.field or not is_file_of_rows(file):
        return False
    try:
        return next(numbered_rows(file), None) is not None
    except UserError:  # an array over several lines, or another encoding
        return False


def _texts_of_csv(config: CsvConfig, files: Sequence[str]) -> dict[str, Any]:
    """Return options of ``datasets`` for which each cell is its text, and an empty one missing."""
    options = {name: value for name, value in config.pd_read_csv_kwargs.items() if name != "chunksize"}
    local = DownloadManager().download(list(files))
    names = [pd.read_csv(file, **options | {"nrows": 0}).columns.astype(str) for file in local]
    for file, found in zip(files, names, strict=True):
        if odd := ", ".join(found.symmetric_difference(names[0])):
            raise UserError(f"{file} and {files[0]} differ in the columns {odd}; give both the same ones.")
    texts = Features({name: Value("string") for name in chain(*names[:1])}) or None
    # By default pandas reads the texts None, NA and null as missing.
    return {"keep_default_na": False, "na_values": [""], "features": texts}


def convert(
    parts: Sequence[tuple[SplitRows, Callable[[dict[str, Any]], dict[str, Any]]]],
    columns: Columns,
    name: str,
    key: str,
) -> Dataset:
    """Return rows made of splits' rows by functions, cached once; change ``key`` when the results change."""

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        for split, row in parts:
            for place, values in split.read(split.names):
                yield place, row(values)

    return written_once(rows, columns, name, repr([key, *(split.key for split, _ in parts)]))


class _HubRows(RowsBySplit):
    """Rows of a dataset whose columns may have other names than this package's.

    Args:
        path: Hub id, or a folder in the layout of one.
        subset: a named configuration of the dataset.
        train_split: the split with the training rows.
        validation_split: the split with the validation rows. None: some training prompts are set aside.
        validation_fraction: share of the prompts that is set aside where there is no validation split, in (0,
            1); all rows of a prompt fall on the same side.
        columns: the dataset's names of columns that are called otherwise here, ``{chosen: response_j}``; null
            for a column that is not to be read, ``{category: null}``.

    Raises:
        UserError: ``validation_fraction`` is outside (0, 1) or set beside a validation split, or a name in
            ``columns`` is unknown.
    """

    def __init__(
        self,
        path: str,
        subset: str | None = None,
        train_split: str = "train",
        validation_split: str | None = None,
        validation_fraction: float = DEFAULT_FRACTION,
        columns: dict[str, str | None] | None = None,
    ):
        self.splits = SplitPlaces(train_split, validation_split, validation_fraction)
        self.known = ("id", *self.columns.responses, *self.columns.optional)
        for name in columns or {}:
            if name not in self.known:
                raise UserError(
                    f"columns names {name!r}, but a row has {', '.join(self.known)}; give the name here: the "
                    "name in the dataset."
                )
        self.path, self.subset, self.names = str(path), subset, columns or {}
        self.files: tuple[str, ...] = (self.path,)
        self.name = self.path

    def _with_our_names(self, place: str) -> SplitRows:
        """Return a split with all of its columns, those that are read under this package's names."""
        texts = [theirs for name in _TEXTS if (theirs := self.names.get(name, name))]
        split = load_split(self.path, place, self.subset, texts=texts)
        for ours, theirs in self.names.items():
            if theirs is not None and theirs not in split.names:
                raise UserError(
                    f"columns has {ours}: {theirs!r}, but {self.path} has the columns "
                    f"{', '.join(split.names)}."
                )
        taken = {*self.names.values()}.difference(self.known)
        given = {name: name for name in split.names if name not in taken} | self.names
        names = {ours: theirs for ours, theirs in given.items() if theirs is not None}
        for name in self.columns.responses:
            if name not in names:
                raise UserError(
                    f"{self.path} has no column {name!r}, but {', '.join(split.names)}; name it, "
                    f"as in --source.columns '{{{name}: response_j}}' for a column response_j "
                    "(--data.source.columns in pacmr fit)."
                )

        def read(few: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
            for row, values in split.read([names[name] for name in few]):
                yield row, {ours: values[theirs] for ours, theirs in names.items() if theirs in values}

        return SplitRows([*names], read, repr([split.key, sorted(names.items())]))

    def read(self, place: str) -> Dataset:
        """Return the rows of the dataset's split ``place``."""
        split = self._with_our_names(place)
        unread = {name: "not read" for name in split.names if name not in self.known}
        split = replace(split, names=[name for name in split.names if name in self.known])
        return convert([(split, lambda row: unread | row)], self.columns, self.path, "hub 1")


class HubPreferences(_HubRows, Source):
    """Preference pairs of any dataset on the Hugging Face Hub, as texts or as chat messages."""

    columns = PREFERENCES

    def write_cleaned(self, output: str, drop: set[str], flip: set[str]) -> int:
        """Write the training split again with all of its columns and rows that training did not use."""
        split, path = self._with_our_names(self.splits.train), self.check_output(output)
        return write_cleaned(self.load_all(), self.path, path, drop, flip, split)


def pairs_of(place: Source | str | Path) -> Source:
    """Return the source of a file of pairs (JSON Lines, Parquet), else of the Hub's dataset of that name."""
    check_is((Source, str, Path), "a file, Hub id or Source; write rows to a JSON Lines file", source=place)
    if isinstance(place, Source):
        return place
    return Files(str(place)) if is_file_of_rows(place) else HubPreferences(str(place))


class HubCompletions(_HubRows, Completions):
    """Demonstrations of any dataset on the Hugging Face Hub, as texts or as chat messages."""

    columns = SFT
