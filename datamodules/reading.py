"""Preference pairs and SFT rows of files, checked and kept in datasets' cache, and their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from lightning.pytorch.utilities import rank_zero_info

from pacmr_lightning.errors import UserError, first_line, user_error
from pacmr_lightning.evaluation.answer_store import content_key
from pacmr_lightning.evaluation.conversation import message_text
from pacmr_lightning.files import content_digest, local_path, read_json_lines

from .chat import decode_messages
from .columns import PREFERENCES, Columns, checked

_LAYOUT = 15
"""Part of the cache's key; raise it when the same file or dataset is read into other rows."""

JSON_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_ENDINGS = (*JSON_ENDINGS, ".parquet")


def read_preferences(path: str | Path) -> Dataset:
    """Return the preference pairs of a file.

    Args:
        path: ``.jsonl`` or ``.json`` (one object a line), either of them with ``.gz``, or ``.parquet``.

    Returns:
        Rows with ``id, prompt, chosen, rejected, category, augmented_prompt, annotator`` (strings),
        ``flipped`` (bool), ``eta`` (float: the probability that chosen is better), ``votes_for``,
        ``votes_against``, ``weight`` and ``p_right`` (floats), ``label`` ("tie", "chosen" or None for any
        other value), ``tools`` and ``chat_template_kwargs`` (JSON); None if missing. Prompt and responses
        are apart, also where the prompt is implicit (``split_prompt``); where that fails, ``reason``
        says why. If ``chat`` is true, the texts are chat messages as JSON, a response a list of one. A
        missing id is a hash of prompt and responses as given, with a counter for repeated rows.

    Raises:
        UserError: the file is missing, unreadable or empty, or a row is wrong; with file and line or row.
    """
    return read_rows(path, PREFERENCES)


def read_rows(path: str | Path, columns: Columns) -> Dataset:
    """Return the rows of a file as ``read_preferences`` does, with other columns."""
    path = _checked_path(path)
    # The path is part of the key because messages name it.
    key = f"{path.resolve()}:{content_digest(path)}"
    return written_once(lambda: numbered_rows(path), columns, str(path), key)


@dataclass(frozen=True)
class SplitRows:
    """Rows of a split, before they are checked."""

    names: list[str]
    """Names of its columns."""
    read: Callable[[Sequence[str]], Iterator[tuple[str, dict[str, Any]]]]
    """Yields rows with these of its columns, and perhaps others, each with its place for errors."""
    key: str
    """Changes with the rows."""

    @classmethod
    def of_dataset(cls, place: str, rows: Dataset, key: str | None = None) -> SplitRows:
        """Return the rows of a dataset."""

        def read(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
            kinds = {name: str(rows.data.schema.field(name).type) for name in names}
            few = [name for name, kind in kinds.items() if "bytes: binary" not in kind]  # not those of images
            for number, values in enumerate(rows.select_columns(few), 1):
                yield f"{place}, row {number}", arrow_row(values)

        return cls(rows.column_names, read, key or rows._fingerprint)

    @classmethod
    def of_files(cls, files: Sequence[str], key: str) -> SplitRows:
        """Return the rows of JSON Lines or Parquet files, with their values as they are written."""
        names = list(dict.fromkeys(chain.from_iterable(map(column_names, files))))
        return cls(names, lambda few: chain.from_iterable(numbered_rows(file, few) for file in files), key)


def rows_to_dataset(rows: Iterable[dict[str, Any]], columns: Columns, name: str) -> Dataset:
    """Return rows of a program, checked as those of a file; errors call them ``name``."""
    given = list(_numbered(rows, name))
    clean = list(checked(lambda: given, columns, name))
    return _announced(Dataset.from_list(clean, features=columns.features), name)


def made_once(make: Callable[[], Iterable[dict[str, Any]]], columns: Columns, name: str, key: str) -> Dataset:
    """Return checked rows of ``make``, written to datasets' cache once; ``key`` must change with the rows."""
    return written_once(lambda: _numbered(make(), name), columns, name, key)


def _numbered(rows: Iterable[dict[str, Any]], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))


def written_once(
    numbered: Callable[[], Iterator[tuple[str, dict[str, Any]]]], columns: Columns, name: str, key: str
) -> Dataset:
    """Return checked rows, written to datasets' cache once; ``numbered`` has each row's place for errors."""
    try:
        rows = Dataset.from_generator(
            lambda: checked(numbered, columns, name),
            features=columns.features,
            # The default hash of a pickled function differs between Python versions.
            fingerprint=content_key(columns.kind, _LAYOUT, key)[:16],
        )
    except DatasetGenerationError as error:
        cause = user_error(error)
        if cause is None:
            raise
        raise UserError(str(cause)) from None
    return _announced(rows, name)


def _announced(rows: Dataset, name: str) -> Dataset:
    values = rows.data.column("unread").unique().to_pylist()
    if unread := sorted({column for columns in values if columns for column in columns.split("\n")}):
        there = {name for name in rows.column_names if rows.data.column(name).null_count < len(rows)}
        unread = [f"{name} (in some rows)" if name in there else name for name in unread]
        _say(f"{name}: these columns are not read: {', '.join(unread)}.")
    odd = Counter(pc.list_flatten(rows.data.column("like_messages")).to_pylist())
    for column, number in odd.items():
        _say(
            f"{name}: {number} of {len(rows)} texts in {column!r} read as chat messages, but others do not, "
            "so all stay texts."
        )
    return rows


@cache
def _say(line: str) -> None:
    """Print a line once per process, as both splits may come from one file."""
    rank_zero_info(line)


def arrow_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return an Arrow row without the null fields that Arrow adds to objects; null columns stay."""

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: full(field) for name, field in value.items() if field is not None}
        return [full(entry) for entry in value] if isinstance(value, list) else value

    return {name: full(value) for name, value in row.items()}


def numbered_rows(
    path: str | Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the rows of a file as they are, each with its place for errors; of Parquet only ``columns``."""
    path = _checked_path(path)
    return _parquet_rows(path, columns) if path.suffix == ".parquet" else read_json_lines(path)


def column_names(path: str | Path) -> list[str]:
    """Return the names of a file's columns; raise a UserError if it cannot be read."""
    if not str(path).endswith(".parquet"):
        return list(dict.fromkeys(name for _, row in numbered_rows(path) for name in row))
    try:
        return list(pq.read_schema(local_path(path)).names)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def _checked_path(path: str | Path) -> Path:
    path = local_path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder, but a file ending in {', '.join(_ENDINGS)} is needed.")
    if not path.exists():
        raise UserError(f"There is no file {path}; check the path, which is relative to {Path.cwd()}.")
    if not path.name.endswith(_ENDINGS):
        raise UserError(
            f"{path} is neither JSON Lines nor Parquet by its ending; use one of {', '.join(_ENDINGS)}, or "
            "for CSV give a folder that holds only this file."
        )
    return path


def _parquet_rows(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            there = columns and [name for name in file.schema_arrow.names if name in columns]
            for batch in file.iter_batches(columns=there):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", arrow_row(row)
    # Damage to the compression is an OSError, to a text a UnicodeDecodeError.
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise _unreadable(path, error, f" after {number} rows") from None


def _unreadable(path: str | Path, error: Exception, place: str = "") -> UserError:
    return UserError(
        f"{path} cannot be read as Parquet{place} ({first_line(error)}); fetch or write it again."
    )


def values_of(rows: Dataset, *names: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of some columns row by row, read in batches for speed and memory."""
    for batch in rows.select_columns(list(names)).iter(batch_size=1000):
        yield from zip(*(batch[name] for name in names), strict=True)


def response_text(response: str, chat: bool) -> str:
    """Return a response of a row as a text: of a chat message its content, and its other fields as JSON."""
    return message_text(decode_messages(response)[0]) if chat else response


def response_texts(rows: Dataset) -> Iterator[tuple[str, str]]:
    """Yield both responses of pairs as texts; unusable rows have empty ones."""
    for *sides, chat, reason in values_of(rows, "chosen", "rejected", "chat", "reason"):
        chosen, rejected = (response_text(side, chat) if reason is None else "" for side in sides)
        yield chosen, rejected


def readable_texts(rows: Dataset, ids: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Prompt, chosen and rejected of usable pairs as a person reads them, labels as found, by their ids."""
    places = {name: i for i, name in enumerate(rows["id"][:])}
    # One read of them all: a row at a time takes several times as long.
    selected = rows.select([places[name] for name in ids]).to_dict()
    columns = (selected[name] for name in ("prompt", "chosen", "rejected", "chat", "tools"))
    for said, chosen, rejected, chat, tools in zip(*columns, strict=True):
        if chat:
            said = "\n\n".join(f"{m['role']}: {message_text(m)}" for m in decode_messages(said))
            said = f"tools: {tools}\n\n{said}" if tools else said
        yield said, response_text(chosen, chat), response_text(rejected, chat)
