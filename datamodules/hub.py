"""Preference pairs and demonstrations from Hugging Face Hub datasets or folders in their layout."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, Value, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetGenerationError
from datasets.features.features import require_decoding
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.csv.csv import CsvConfig

from pacmr_lightning.errors import UserError, first_line
from pacmr_lightning.evaluation.answer_store import content_key
from pacmr_lightning.files import content_digest, expanded, is_file_of_rows
from pacmr_lightning.hub_access import locate

from .columns import PREFERENCES, SFT, Columns
from .reading import arrow_row, written_once
from .sources import Completions, Files, Source
from .splits import DEFAULT_FRACTION, RowsBySplit, SplitPlaces


def load_split(path: str, split: str, subset: str | None = None, folder: str | None = None) -> Dataset:
    """Return a split of a Hub dataset or of a folder in its layout; ``folder`` is a ``data_dir`` in it."""
    # datasets compares local files by their time only, so the cache is named by content.
    path = expanded(path)
    content = content_digest(path) if Path(path).is_dir() else None
    cache = None if content is None else Path(datasets.config.HF_DATASETS_CACHE) / "pacmr-folders" / content
    options: dict[str, Any] = {"name": subset, "data_dir": folder, "cache_dir": cache and str(cache)}
    where = path + "".join(f", {part}" for part in (subset, folder) if part)
    *owner, last = path.split("/")
    its_cache = "___".join([*owner, camelcase_to_snakecase(last)])
    locate(path, "dataset", Path(datasets.config.HF_DATASETS_CACHE, its_cache))
    try:
        if isinstance(load_dataset_builder(path, **options).config, CsvConfig):
            # By default pandas reads the texts None, NA and null as missing.
            options |= {"keep_default_na": False, "na_values": [""]}
        found = load_dataset(path, split=split, **options)
    except DatasetGenerationError as error:
        raise UserError(
            f"The split {split!r} of the dataset {where} cannot be read ({first_line(error.__cause__)}); "
            "fetch it again."
        ) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"The split {split!r} of the dataset {where} cannot be loaded ({first_line(error)}); give a Hub "
            "id or a folder, a subset and a split that exist."
        ) from None
    if content is not None:
        found._fingerprint = content_key(content, subset, folder, split)[:16]
    return found


def convert(
    parts: Sequence[tuple[str, Dataset]],
    columns: Columns,
    row: Callable[[str, dict[str, Any]], dict[str, Any]],
    name: str,
    key: str,
) -> Dataset:
    """Return rows that ``row`` makes of datasets, cached once; change ``key`` when its results change."""

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        for part, dataset in parts:
            for number, values in enumerate(dataset, 1):
                yield f"{part}, row {number}", row(part, arrow_row(values))

    states = [key, *(dataset._fingerprint for _, dataset in parts)]
    return written_once(rows, columns, name, repr(states))


class _HubRows(RowsBySplit):
    """Rows of a dataset whose columns may have other names than this package's.

    Args:
        path: Hub id, or a folder in the layout of one.
        subset: a named configuration of the dataset.
        train_split: the split with the training rows.
        validation_split: the split with the validation rows. None: some training prompts are set aside.
        validation_fraction: share of the prompts that is set aside where there is no validation split, in (0,
            1); all rows of a prompt fall on the same side.
        columns: the dataset's names of columns that are called otherwise here, ``{chosen: response_j}``.

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
        columns: dict[str, str] | None = None,
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
        self.name = self.path

    def read(self, place: str) -> Dataset:
        """Return the rows of the dataset's split ``place``."""
        found = load_split(self.path, place, self.subset)
        for ours, theirs in self.names.items():
            if theirs not in found.column_names:
                raise UserError(
                    f"columns has {ours}: {theirs!r}, but {self.path} has the columns "
                    f"{', '.join(found.column_names)}."
                )
        names = {name: name for name in self.known if name in found.column_names} | self.names
        responses = self.columns.responses
        has_texts = any(isinstance(found.features[names[name]], Value) for name in responses if name in names)
        for name in (*responses, *(self.columns.required if has_texts else ())):
            if name not in names:
                raise UserError(
                    f"{self.path} has no column {name!r}, but {', '.join(found.column_names)}; name it, "
                    f"as in --source.columns '{{{name}: response_j}}' does for a column response_j."
                )
        others = [name for name in found.column_names if name not in names.values()]
        media = [name for name in others if require_decoding(found.features[name])]

        def row(part: str, values: dict[str, Any]) -> dict[str, Any]:
            unread = {name: values.get(name, "not decoded") for name in others}
            return unread | {ours: values[theirs] for ours, theirs in names.items()}

        parts = [(f"{self.path} {place}", found.remove_columns(media))]
        return convert(parts, self.columns, row, self.path, repr(sorted(names.items())))


class HubPreferences(_HubRows, Source):
    """Preference pairs of any dataset on the Hugging Face Hub, as texts or as chat messages."""

    columns = PREFERENCES


def pairs_of(place: str | Path) -> Source:
    """Return the source of a file of pairs (JSON Lines, Parquet), else of the Hub's dataset of that name."""
    return Files(str(place)) if is_file_of_rows(place) else HubPreferences(str(place))


class HubCompletions(_HubRows, Completions):
    """Demonstrations of any dataset on the Hugging Face Hub, as texts or as chat messages."""

    columns = SFT
