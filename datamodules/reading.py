"""Reads preference pairs and SFT rows from JSON Lines and Parquet files, and says what is wrong with them.

Rows become a ``datasets.Dataset`` of fixed features, written to datasets' cache once for each content of a
file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from lightning.pytorch.utilities import rank_zero_info

from pacmr_lightning.command_line.exceptions import user_error
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import content_digest

from .columns import PREFERENCES, SFT, Columns, checked

_LAYOUT = 6
"""Part of the cache's key; raised whenever the same file or dataset is read into other rows."""

_JSON_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_ENDINGS = (*_JSON_ENDINGS, ".parquet")


def read_preferences(path: str | Path) -> Dataset:
    """Preference pairs of a file.

    Args:
        path: ``.jsonl`` or ``.json`` (one object a line), either of them with ``.gz``, or ``.parquet``.

    Returns:
        Rows with ``id, prompt, chosen, rejected, category, augmented_prompt, annotator`` (strings; annotator:
        who gave the label), ``flipped`` (bool), ``eta`` (float: the probability that chosen is the better
        one), ``tools`` and ``chat_template_kwargs`` (JSON); None where the file says nothing. Columns that
        are not read are named in a line.
        Where ``chat`` is true, the texts are chat messages as JSON; ``prompts.split_row`` makes one prompt
        and two responses of a row, also where the prompt is implicit (None). A missing id is a hash of
        prompt and responses with a counter for repeated rows.

    Raises:
        UserError: the file is missing, unreadable or empty, or a row is wrong; with file and line or row.
    """
    return _read(path, PREFERENCES)


def read_sft(path: str | Path) -> Dataset:
    """Demonstrations: ``id, prompt, completion, chat``; files, ids and errors as in ``read_preferences``."""
    return _read(path, SFT)


def _read(path: str | Path, columns: Columns) -> Dataset:
    path = _checked_path(path)
    # The path is a part of it because errors and made-up ids of rows name it.
    key = f"{path.resolve()}:{content_digest(path)}"
    return written_once(lambda: numbered_rows(path), columns, str(path), key)


def rows_to_dataset(rows: Iterable[dict[str, Any]], columns: Columns, name: str) -> Dataset:
    """The same checks and features for rows of a program; errors say ``name`` for the file."""
    found = list(checked(_numbered(rows, name), columns, name))
    return _announced(Dataset.from_list(found, features=columns.features), name)


def made_once(make: Callable[[], Iterable[dict[str, Any]]], columns: Columns, name: str, key: str) -> Dataset:
    """The same, written to datasets' cache once for each key; it changes whenever ``make`` makes others."""
    return written_once(lambda: _numbered(make(), name), columns, name, key)


def _numbered(rows: Iterable[dict[str, Any]], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))


def written_once(
    numbered: Callable[[], Iterator[tuple[str, dict[str, Any]]]], columns: Columns, name: str, key: str
) -> Dataset:
    """The same for rows with the place that errors about each begin with."""
    try:
        rows = Dataset.from_generator(
            lambda: checked(numbered(), columns, name),
            features=columns.features,
            # A fingerprint that datasets makes of a pickled function differs between versions of Python.
            fingerprint=hashlib.sha256(f"{columns.kind}:{_LAYOUT}:{key}".encode()).hexdigest()[:16],
        )
    except DatasetGenerationError as error:
        cause = user_error(error)
        if cause is None:
            raise
        raise UserError(str(cause)) from None
    return _announced(rows, name)


def _announced(rows: Dataset, name: str) -> Dataset:
    """Return the rows, after a line on columns that are not read, and on prompts that some rows lack."""
    found = rows.data.column("unread").unique().to_pylist()
    if unread := sorted({column for columns in found if columns for column in columns.split("\n")}):
        _say(f"{name}: these columns are not read: {', '.join(unread)}.")
    texts = pc.invert(rows.data.column("chat"))
    lacking = pc.and_(texts, pc.is_null(rows.data.column("prompt")))
    count, missing = (pc.sum(flags).as_py() or 0 for flags in (texts, lacking))
    if 0 < missing < count:
        _say(
            f"{name}: {missing} of {count} rows of texts have no prompt, so it is what their responses "
            "begin with; give them one if it is not."
        )
    return rows


@cache
def _say(line: str) -> None:
    """Print a line once in a process: both splits may come from one file."""
    rank_zero_info(line)


def arrow_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of Arrow as its JSON would be.

    Without the null fields that Arrow gives an object because another one has them; null columns stay.
    """

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: full(field) for name, field in value.items() if field is not None}
        return [full(entry) for entry in value] if isinstance(value, list) else value

    return {name: full(value) for name, value in row.items()}


def numbered_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file as they are, each with the place it stands at, which errors begin with.

    Raises:
        UserError: the file is missing or unreadable.
    """
    path = _checked_path(path)
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def _checked_path(path: str | Path) -> Path:
    path = Path(path).expanduser()
    if path.is_dir():
        raise UserError(f"{path} is a folder, but a file ending in {', '.join(_ENDINGS)} is needed.")
    if not path.exists():
        raise UserError(f"There is no file {path}; check the path, which is relative to {Path.cwd()}.")
    if not path.name.endswith(_ENDINGS):
        raise UserError(
            f"{path} is neither JSON Lines nor Parquet by its ending; use one of {', '.join(_ENDINGS)}."
        )
    return path


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a JSON Lines file, each with the place it stands at; blank lines are passed over."""
    place = f"{path}, line 1"
    try:
        # utf-8-sig, because files that were written on Windows often begin with a byte order mark.
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                place = f"{path}, line {number}"
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(
                        f"{place} is not JSON ({error.msg} at column {error.colno}); write one object a line."
                    ) from None
                # A whole number of more than 4,300 digits, or lists in lists in lists.
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{place} cannot be read ({str(error).partition(';')[0]}); write that value as a "
                        "text, or remove it."
                    ) from None
                if not isinstance(row, dict):
                    raise UserError(
                        f"{place} is a JSON {type(row).__name__} and not an object; write one object a line."
                    )
                yield place, row
    except UnicodeDecodeError:
        raise UserError(f"{place} or the one after it is not UTF-8 text; save the file as UTF-8.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UserError(
            f"{path} is broken as a gzip file after {place}; compress or fetch it again."
        ) from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", arrow_row(row)
    # Damage is an OSError where it breaks the compression, and no UTF-8 where it is in a text.
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"{path} cannot be read as Parquet after {number} rows ({reason}); fetch or write it again."
        ) from None
