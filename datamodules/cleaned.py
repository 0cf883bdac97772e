"""Writing preference pairs without their wrong labels, in the format of their source."""

import json
import re
from collections.abc import Iterable
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from tqdm import tqdm

from pacmr_lightning.errors import UserError, first_line
from pacmr_lightning.files import local_path, replacing, write_json_lines

from .columns import OPPOSITES, PREFERENCES, words_of
from .reading import SplitRows, read_rows

_SIDE = re.compile("chosen|rejected|(?<=votes_)(for|against)", re.IGNORECASE)
_OTHER = {"chosen": "rejected", "rejected": "chosen", "for": "against", "against": "for"}
_DIFFERENCE = frozenset(("margin", "margins", "diff", "difference", "differences", "minus"))
"""Words in names of columns of differences, chosen minus rejected."""
_AT_A_TIME = 1000


def clean_file(file: str, path: Path, drop: set[str], flip: set[str]) -> int:
    """Write the rows of a file in its own columns and format, with rows that training did not use."""
    given = SplitRows.of_files([file], file)
    return write_cleaned(read_rows(file, PREFERENCES), file, path, drop, flip, given)


def write_cleaned(
    rows: Dataset, source: str, path: Path, drop: set[str], flip: set[str], given: SplitRows | None = None
) -> int:
    """Write rows of a source, as ``given`` or in this package's columns; see ``Source.write_cleaned``."""
    ids, asked = rows["id"][:], drop | flip
    if missing := sorted(asked.difference(ids)):
        raise UserError(
            f"{source} has no row {missing[0]!r} any more ({len(missing)} of {len(asked)} are missing); "
            "restore the data that the run was trained with."
        )
    if given is None:
        raw: Iterable[dict[str, Any]] = map(plain_row, rows)
        reasons = zip(ids, rows["reason"][:], rows["chat"][:], strict=True)
        # They have no prompt, and a file has one in all rows or in none.
        if out := {pair for pair, why, chat in reasons if why is not None and not chat}:
            print(f"{len(out):,} rows without a common prompt are left out, as in training.")
        drop = drop | out
    else:
        raw = (row for _, row in given.read(given.names))
        if flip:
            _announce(given.names)
    names = None if given is None else given.names
    pairs = zip(ids, raw, strict=True)
    kept = (exchanged(row, names) if pair in flip else row for pair, row in pairs if pair not in drop)
    shown = tqdm(kept, desc=path.name, unit="row")
    if path.suffix == ".parquet":
        return _write_parquet(shown, path, source, flip)
    # JSON has dates and decimals as texts, and no bytes.
    return write_json_lines(path, shown, default=lambda v: None if isinstance(v, bytes) else str(v))


def exchanged(row: dict[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return a row with the label swapped; ``names`` are the columns of all rows, by default its own.

    Columns whose names differ in the side alone, such as ``score_chosen`` and ``score_rejected``, change
    places. Numbers in columns such as ``margin`` change their sign. Columns of objects stay as they are.
    """
    known = frozenset(row if names is None else names)
    places = dict.fromkeys(each for name in row for each in (name, _partner(name, known)))
    swapped = {name: row[other] for name in places if (other := _partner(name, known)) in row}
    for name, value in swapped.items():
        if name in OPPOSITES and value is not None:
            if isinstance(value, str):
                value = PREFERENCES.optional[name](value)
            swapped[name] = not value if isinstance(value, bool) else 1 - value
        elif _is_difference(name, known):
            swapped[name] = _negated(value)
    return swapped


def _negated(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", text := value.strip()):
        return text[1:] if text.startswith("-") else f"-{text.removeprefix('+')}"
    return -value if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) else value


def _partner(name: str, names: frozenset[str]) -> str:
    """Return the column of the other side among ``names``, or the column itself."""
    other = _SIDE.sub(_other_side, name)
    return other if other in names else name


def _other_side(match: re.Match[str]) -> str:
    word = match[0]
    other = _OTHER[word.lower()]
    return other.upper() if word.isupper() else other.title() if word[0].isupper() else other


def _is_difference(name: str, names: frozenset[str]) -> bool:
    return _partner(name, names) == name and not _DIFFERENCE.isdisjoint(words_of(name))


def _announce(names: list[str]) -> None:
    """Print the columns that are swapped with a label, and those that are not."""
    known = frozenset(names)
    places = [name for name in names if _partner(name, known) != name]
    signs = [name for name in names if _is_difference(name, known)]
    changed = {"id", *PREFERENCES.responses, *PREFERENCES.optional, *places, *signs} - {"label"}
    others = [name for name in names if name not in changed]
    for columns, what in (
        (places, "Columns that are exchanged where a label is swapped"),
        (signs, "Columns whose numbers change their sign where a label is swapped"),
        (others, "Columns that are not changed where a label is swapped; check those that describe a side"),
    ):
        if columns and columns != ["chosen", "rejected"]:
            print(f"{what}: {', '.join(columns)}.".encode(errors="replace").decode())


def _write_parquet(rows: Iterable[dict[str, Any]], path: Path, train: str, flip: set[str]) -> int:
    """Write rows in the types of the file ``train``; both columns of a pair get one that holds both."""
    schema, count = pq.read_schema(local_path(train)), 0
    names = frozenset(schema.names)
    left = iter(rows)
    try:
        if flip:
            other = pa.schema([field.with_name(_partner(field.name, names)) for field in schema])
            schema = pa.unify_schemas([schema, other], promote_options="permissive")
        with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
            while part := list(islice(left, _AT_A_TIME)):
                writer.write_table(pa.Table.from_pylist(part, schema=schema))
                count += len(part)
    except (pa.ArrowException, OverflowError) as error:  # two types that do not fit, or an unsigned margin
        raise UserError(
            f"A column cannot hold its values where a label is swapped ({first_line(error)}); give it "
            "another type, that of its other side if it has one, or take it out."
        ) from None
    return count


def plain_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a ``Source`` as in a file: messages as lists, ``tools`` as JSON text."""
    about = ("chat", "template_fields", "unread", "like_messages", "texts", "reason")
    plain = {name: value for name, value in row.items() if value is not None and name not in about}
    for name in ("prompt", "chosen", "rejected", "augmented_prompt", "chat_template_kwargs"):
        if name in plain and (row["chat"] or name == "chat_template_kwargs"):
            plain[name] = json.loads(plain[name])
    return plain
