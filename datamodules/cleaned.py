"""Writing preference pairs without their wrong labels, in the format of their source."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset
from tqdm import tqdm

from pacmr_lightning.errors import UserError, first_line
from pacmr_lightning.files import local_path, replacing

from .columns import OPPOSITES, PREFERENCES, checked, words_of
from .reading import numbered_rows

_JSON = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_SIDE = re.compile("chosen|rejected|(?<=votes_)(for|against)", re.IGNORECASE)
_OTHER = {"chosen": "rejected", "rejected": "chosen", "for": "against", "against": "for"}
_DIFFERENCE = re.compile("margins?|diff|differences?|minus")
"""Words in names of columns of differences, chosen minus rejected."""


def check_output(name: str, output: str, files: Iterable[str | None] = ()) -> Path:
    """Return the path to write source ``name`` to: none of its ``files``, and in the format of the first."""
    path = local_path(output)
    own = [local_path(file) for file in files if file]
    if path.resolve() in [file.resolve() for file in own]:
        raise UserError(f"cleaned is {output}, which is the run's own data; name another file.")
    endings: tuple[str, ...] = (*_JSON, ".parquet")
    if own:
        endings = (".parquet",) if own[0].suffix == ".parquet" else _JSON
    if not path.name.endswith(endings) or path.is_dir():
        raise UserError(
            f"cleaned is {output}, but the pairs of {name} are written to a file ending in "
            f"{' or '.join(endings)}."
        )
    return path


def clean_rows(rows: Dataset, name: str, path: Path, drop: set[str], flip: set[str]) -> int:
    """Write rows of a source in this package's columns; see ``Source.write_cleaned``."""
    _check_ids(name, rows["id"][:], drop | flip)
    kept = (exchanged(row) if row["id"] in flip else row for row in rows if row["id"] not in drop)
    return write_rows(kept, path)


def clean_file(train: str, path: Path, drop: set[str], flip: set[str]) -> int:
    """Write the rows of a file in its own columns and format.

    Prints the columns that are swapped with a label, and those that are not.
    """
    sides = Sides()
    ids = [row["id"] for row in checked(lambda: sides.seen(numbered_rows(train)), PREFERENCES, train)]
    _check_ids(Path(train).name, ids, drop | flip)
    if flip:
        sides.announce()
    if path.suffix == ".parquet":
        return _write_parquet(local_path(train), path, ids, drop, flip, sides)
    raw = zip(ids, (row for _, row in numbered_rows(train)), strict=True)
    return _write_json(
        (sides.exchanged(row) if name in flip else row for name, row in raw if name not in drop), path
    )


def _check_ids(name: str, there: Iterable[str], asked: set[str]) -> None:
    if missing := sorted(asked.difference(there)):
        raise UserError(
            f"{name} has no row {missing[0]!r} any more ({len(missing)} of {len(asked)} are missing); "
            "restore the data that the run was trained with."
        )


def exchanged(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of this package's columns with the label swapped."""
    return Sides(row).exchanged(row)


class Sides:
    """Columns of rows that describe the chosen or the rejected response.

    Names that differ in that word alone, such as ``score_chosen`` and ``score_rejected``, are a pair. Numbers
    in columns such as ``margin`` are differences. Columns of objects are left as they are.
    """

    def __init__(self, names: Iterable[str] = ()):
        self.names = dict.fromkeys(names)
        self.texts: set[str] = set()
        """Not only numbers."""

    def seen(self, rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the rows, and add their columns."""
        for place, row in rows:
            self.names |= dict.fromkeys(row)
            self.texts |= {name for name, value in row.items() if not _is_number(value) and value is not None}
            yield place, row

    def partner(self, name: str) -> str:
        """Return the other column of a pair, or the column itself."""
        other = _SIDE.sub(_other_side, name)
        return other if other in self.names else name

    def is_difference(self, name: str) -> bool:
        """Return whether a column is a difference, which changes its sign."""
        return name not in self.texts and self.partner(name) == name and _has(name, _DIFFERENCE)

    def exchanged(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with the label swapped; a field that only its pair has moves there."""
        names = dict.fromkeys(each for name in row for each in (name, self.partner(name)))
        found = {name: row[self.partner(name)] for name in names if self.partner(name) in row}
        for name, value in found.items():
            if name in OPPOSITES and value is not None:
                found[name] = not value if isinstance(value, bool) else 1 - value
            elif self.is_difference(name) and _is_number(value):
                found[name] = -value
        return found

    def exchanged_table(self, rows: pa.Table, flips: np.ndarray) -> pa.Table:
        """Return rows with the label swapped where (N,) ``flips``, in types that hold both sides' values."""
        names = rows.column_names
        swapped = rows.filter(pa.array(flips)).rename_columns([self.partner(name) for name in names])
        swapped = swapped.select(names)
        try:
            for i, field in enumerate(rows.schema):
                column = swapped.column(i)
                if _holds_text(field.type) and _holds_text(column.type):
                    column = column.cast(field.type)
                elif field.name in OPPOSITES and pa.types.is_boolean(field.type):
                    column = pc.invert(column)
                elif field.name in OPPOSITES and not pa.types.is_null(field.type):
                    column = pc.subtract(pa.scalar(1).cast(field.type), column)
                elif self.is_difference(field.name) and not pa.types.is_null(field.type):
                    column = pc.negate_checked(column)
                swapped = swapped.set_column(i, field.name, column)
            both = [rows.filter(pa.array(~flips)), swapped]
            joint = pa.concat_tables(both, promote_options="permissive")
        except pa.ArrowException as error:  # two types that do not fit, or an unsigned margin
            raise UserError(
                f"A column cannot hold its values where a label is swapped ({first_line(error)}); give it "
                "another type, that of its other side if it has one, or take it out."
            ) from None
        order = np.concatenate([np.flatnonzero(~flips), np.flatnonzero(flips)])
        return joint.take(np.argsort(order))

    def announce(self) -> None:
        """Print the columns that are swapped with a label, and those that are not."""
        places = [name for name in self.names if self.partner(name) != name]
        signs = [name for name in self.names if self.is_difference(name)]
        known = {"id", *PREFERENCES.responses, *PREFERENCES.optional, *places, *signs} - {"label"}
        for names, what in (
            (places, "are exchanged where a label is swapped"),
            (signs, "change their sign where a label is swapped"),
            (
                [name for name in self.names if name not in known],
                "are not changed where a label is swapped; check those that describe a side",
            ),
        ):
            if names and names != ["chosen", "rejected"]:
                print(f"Columns that {what}: {', '.join(names)}.")


def _other_side(found: re.Match[str]) -> str:
    word = found[0]
    other = _OTHER[word.lower()]
    return other.upper() if word.isupper() else other.title() if word[0].isupper() else other


def _has(name: str, word: re.Pattern[str]) -> bool:
    return any(map(word.fullmatch, words_of(name)))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def _write_json(rows: Iterator[dict[str, Any]], path: Path) -> int:
    count = 0
    with replacing(path) as temporary:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(temporary, "wt", encoding="utf-8", newline="\n") as file:
            for row in tqdm(rows, desc=path.name, unit="row"):
                file.write(_line(row) + "\n")
                count += 1
    return count


def _line(row: dict[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(row)
    return text


def _write_parquet(
    train: Path, path: Path, ids: list[str], drop: set[str], flip: set[str], sides: Sides
) -> int:
    count, start = 0, 0
    with pq.ParquetFile(train) as file, replacing(path) as temporary:
        schema = file.schema_arrow
        if flip:
            schema = sides.exchanged_table(schema.empty_table(), np.zeros(0, bool)).schema
        with (
            pq.ParquetWriter(temporary, schema) as writer,
            tqdm(total=len(ids), desc=path.name, unit="row") as bar,
        ):
            for batch in file.iter_batches():
                names, table = ids[start : start + len(batch)], pa.Table.from_batches([batch])
                start += len(batch)
                if flip:
                    table = sides.exchanged_table(table, np.array([name in flip for name in names]))
                table = table.filter(pa.array([name not in drop for name in names]))
                writer.write_table(table)
                count += len(table)
                bar.update(len(batch))
    return count


def _holds_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """Write rows in this package's columns, except empty ones; return their number.

    In Parquet, nested values in place of texts get an inferred type.
    """
    plain = (plain_row(row) for row in rows)
    if path.suffix != ".parquet":
        return _write_json(plain, path)
    found, columns = list(plain), {}
    try:
        for field in PREFERENCES.features.arrow_schema:
            values = [row.get(field.name) for row in found]
            nested = any(isinstance(value, (list, dict)) for value in values) and field.type == pa.string()
            if any(value is not None for value in values):
                columns[field.name] = pa.array(values, None if nested else field.type)
        with replacing(path) as temporary:
            pq.write_table(pa.table(columns), temporary)
    except pa.ArrowException:
        raise UserError(
            f"{path} cannot be written: a column of Parquet cannot hold texts and chat messages, nor "
            "messages whose fields are empty or of several types; give a file ending in .jsonl."
        ) from None
    return len(found)


def plain_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a ``Source`` as in a file: messages as lists, ``tools`` as JSON text."""
    about = ("chat", "template_fields", "unread", "like_messages", "texts", "reason", "prompt_given")
    found = {name: value for name, value in row.items() if value is not None and name not in about}
    for name in ("prompt", "chosen", "rejected", "augmented_prompt", "chat_template_kwargs"):
        if name in found and (row["chat"] or name == "chat_template_kwargs"):
            found[name] = json.loads(found[name])
    return found
