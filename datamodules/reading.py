"""Reads preference pairs and SFT rows from JSON Lines and Parquet files, and says what is wrong with them.

Rows become a ``datasets.Dataset`` of fixed features, written to datasets' cache once for each state of a
file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, Value
from datasets.exceptions import DatasetGenerationError

from pacmr_lightning.errors import UserError

_LAYOUT = 1
"""Part of the cache's key; raised whenever the same file is read into other rows."""

_JSON_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_ENDINGS = (*_JSON_ENDINGS, ".parquet")


def _text(value: object) -> str:
    if isinstance(value, list):
        raise ValueError("a list; chat messages are not supported yet, so give the text as one string")
    if not isinstance(value, str):
        raise ValueError(f"{value!r}, but it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is no valid text; remove that character") from None
    return value


def _label(value: object) -> str:
    # Ids and categories are often numbers; as text they mean the same.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool) and value not in (0, 1):
        raise ValueError(f"{value!r}, but it must be true or false")
    return bool(value)


def _probability(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{value!r}, but it must be a probability between 0 and 1")
    return float(value)


@dataclass(frozen=True)
class Columns:
    """Which columns a kind of row has, and how their values are checked."""

    kind: str
    required: dict[str, Callable]
    optional: dict[str, Callable]
    hashed: tuple[str, ...]
    """Columns that a missing id is made of."""
    features: Features


PREFERENCES = Columns(
    kind="preferences",
    required={"chosen": _text, "rejected": _text},
    optional={
        "prompt": _text,
        "id": _label,
        "category": _label,
        "augmented_prompt": _text,
        "flipped": _flag,
        "eta": _probability,
    },
    hashed=("prompt", "chosen", "rejected"),
    features=Features(
        {
            name: Value("string")
            for name in ("id", "prompt", "chosen", "rejected", "category", "augmented_prompt")
        }
        | {"flipped": Value("bool"), "eta": Value("float64")}
    ),
)
SFT = Columns(
    kind="sft",
    required={"prompt": _text, "completion": _text},
    optional={"id": _label},
    hashed=("prompt", "completion"),
    features=Features({name: Value("string") for name in ("id", "prompt", "completion")}),
)


def read_preferences(path: str | Path) -> Dataset:
    """Preference pairs of a file.

    Args:
        path: ``.jsonl`` or ``.json`` (one object a line), either of them with ``.gz``, or ``.parquet``.

    Returns:
        Rows with ``id, prompt, chosen, rejected, category, augmented_prompt`` (strings), ``flipped`` (bool)
        and ``eta`` (float: the probability that chosen is the better one); None where the file says nothing.
        A prompt of None is implicit in the two texts (see ``prompts.py``). A missing id is a hash of prompt
        and responses with a counter for repeated rows.

    Raises:
        UserError: the file is missing, unreadable or empty, or a row is wrong; with file and line or row.
    """
    return _read(path, PREFERENCES)


def read_sft(path: str | Path) -> Dataset:
    """Demonstrations: ``id, prompt, completion``; files, ids and errors as in ``read_preferences``."""
    return _read(path, SFT)


def rows_to_dataset(rows: Iterable[dict], columns: Columns, name: str) -> Dataset:
    """The same checks and features for rows of a program; errors say ``name`` for the file."""
    numbered = ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))
    return Dataset.from_list(list(_checked(numbered, columns, name)), features=columns.features)


def _read(path: str | Path, columns: Columns) -> Dataset:
    path = Path(path).expanduser()
    if path.is_dir():
        raise UserError(f"{path} is a folder, but a file ending in {', '.join(_ENDINGS)} is needed.")
    if not path.exists():
        raise UserError(f"There is no file {path}; check the path, which is relative to {Path.cwd()}.")
    if not path.name.endswith(_ENDINGS):
        raise UserError(
            f"{path} is neither JSON Lines nor Parquet by its ending; use one of {', '.join(_ENDINGS)}."
        )
    state = path.stat()
    key = f"{_LAYOUT}:{columns.kind}:{path.resolve()}:{state.st_size}:{state.st_mtime_ns}"
    try:
        return Dataset.from_generator(
            _file_rows,
            features=columns.features,
            gen_kwargs={"path": str(path), "kind": columns.kind},
            # A changed file must not be served from the cache; the key is given because a fingerprint that
            # datasets makes of a pickled function differs between versions of Python.
            fingerprint=hashlib.sha256(key.encode()).hexdigest()[:16],
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, UserError):
            raise UserError(str(error.__cause__)) from None
        raise


def _file_rows(path: str, kind: str) -> Iterator[dict]:
    columns = {c.kind: c for c in (PREFERENCES, SFT)}[kind]
    numbered = _parquet_rows(Path(path)) if path.endswith(".parquet") else _json_rows(Path(path))
    yield from _checked(numbered, columns, path)


def _json_rows(path: Path) -> Iterator[tuple[str, dict]]:
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


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{path} cannot be read as Parquet ({str(error).splitlines()[0]}); write it again."
        ) from None


def _checked(numbered: Iterable[tuple[str, dict]], columns: Columns, source: str) -> Iterator[dict]:
    """Rows with checked values and unique ids."""
    places: dict[str, str] = {}
    repeats: Counter[str] = Counter()
    for place, row in numbered:
        clean = {}
        for name, check in (columns.required | columns.optional).items():
            value = row.get(name)
            if value is None and name in columns.required:
                found = ", ".join(repr(c) for c in row) or "none"
                raise UserError(
                    f"{place} has no {name!r} (columns found: {found}); rename the column or remove the row."
                )
            try:
                clean[name] = None if value is None else check(value)
            except ValueError as error:
                raise UserError(f"{place}: {name!r} is {error}.") from None
        if clean["id"] is None:
            digest = _content_hash(clean[name] for name in columns.hashed)
            clean["id"] = f"{digest}-{repeats[digest]}"
            repeats[digest] += 1
        elif clean["id"] in places:
            raise UserError(
                f"{place} has the id {clean['id']!r} of {places[clean['id']]}; "
                "give each row its own id, or leave the ids out and they are made."
            )
        places[clean["id"]] = place
        yield clean
    if not places:
        raise UserError(f"{source} is empty; it must hold at least one row.")


def _content_hash(texts: Iterable[str | None]) -> str:
    # JSON keeps texts apart that would be the same when simply joined, and no prompt apart from an empty one.
    return hashlib.blake2b(json.dumps(list(texts)).encode(), digest_size=8).hexdigest()
