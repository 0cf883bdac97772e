"""Writes preference pairs again without their wrong labels, in the form in which they were found."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing

from .chat import decode_messages
from .columns import PREFERENCES, checked
from .reading import numbered_rows
from .sources import Files, Source

_JSON = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


def check_output(source: Source, output: str) -> Path:
    """The file to write the pairs of a source to.

    Raises:
        UserError: it is a file of the source, or its ending is not that of the source's format.
    """
    path = Path(output).expanduser()
    endings: tuple[str, ...] = (*_JSON, ".parquet")
    if isinstance(source, Files):
        own = [Path(file).expanduser() for file in (source.splits.train, source.splits.validation) if file]
        if path.resolve() in [file.resolve() for file in own]:
            raise UserError(f"cleaned is {output}, which is the run's own data; name another file.")
        train = own[0]
        endings = (".parquet",) if train.suffix == ".parquet" else _JSON
    if not path.name.endswith(endings) or path.is_dir():
        raise UserError(
            f"cleaned is {output}, but the pairs of {source.name} are written to a file ending in "
            f"{' or '.join(endings)}."
        )
    return path


def write_cleaned(source: Source, output: str, drop: set[str], flip: set[str]) -> int:
    """Writes all training rows of a source, some of them dropped and some with their label exchanged.

    Rows of ``Files`` keep their columns, their order and the format of their file, rows that training did not
    use included; other sources are written in this package's own columns. Where a label is exchanged,
    ``chosen`` and ``rejected`` change places, and ``flipped`` and ``eta``, which speak of the label, become
    their opposites.

    Args:
        source: where the rows come from.
        output: file to write.
        drop: ids of rows to leave out.
        flip: ids of rows whose label is exchanged, against the label that was found.

    Returns:
        The number of rows written.

    Raises:
        UserError: the output does not fit the source, or an id is not there.
    """
    path = check_output(source, output)
    if not isinstance(source, Files):
        rows = source.load_all()
        _check_ids(source, set(rows["id"]), drop | flip)
        kept = (exchanged(row) if row["id"] in flip else row for row in rows if row["id"] not in drop)
        return write_rows(kept, path)
    train = source.splits.train
    ids = [row["id"] for row in checked(numbered_rows(train), PREFERENCES, train)]
    _check_ids(source, set(ids), drop | flip)
    if path.suffix == ".parquet":
        return _write_parquet(Path(train).expanduser(), path, ids, drop, flip)
    raw = (row for _, row in numbered_rows(train))
    return _write_json(
        (
            exchanged(row) if name in flip else row
            for name, row in zip(ids, raw, strict=True)
            if name not in drop
        ),
        path,
    )


def _check_ids(source: Source, there: set[str], asked: set[str]) -> None:
    if missing := sorted(asked - there):
        raise UserError(
            f"{source.name} has no row {missing[0]!r} any more ({len(missing)} of {len(asked)} are missing); "
            "restore the data that the run was trained with."
        )


def exchanged(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the other label; ``flipped`` and ``eta`` become their opposites."""
    row = row | {"chosen": row["rejected"], "rejected": row["chosen"]}
    for name in ("flipped", "eta"):
        if row.get(name) is not None:
            row[name] = not row[name] if isinstance(row[name], bool) else 1 - row[name]
    return row


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
    except UnicodeEncodeError:  # half of a surrogate pair in a column that nobody reads
        text = json.dumps(row)
    return text


def _write_parquet(train: Path, path: Path, ids: list[str], drop: set[str], flip: set[str]) -> int:
    count, start = 0, 0
    with pq.ParquetFile(train) as file, replacing(path) as temporary:
        schema = file.schema_arrow
        with (
            pq.ParquetWriter(temporary, schema) as writer,
            tqdm(total=len(ids), desc=path.name, unit="row") as bar,
        ):
            for batch in file.iter_batches():
                names = ids[start : start + len(batch)]
                start += len(batch)
                touched = {"chosen", "rejected", "flipped", "eta"} & set(schema.names)
                # Other columns are copied as they are: not all of Arrow survives being made Python objects.
                rows = batch.select(sorted(touched)).to_pylist()
                rows = [
                    exchanged(row) if name in flip else row for name, row in zip(names, rows, strict=True)
                ]
                columns = [
                    pa.array([row[field.name] for row in rows], field.type)
                    if field.name in touched
                    else batch.column(field.name)
                    for field in schema
                ]
                kept = pa.array([name not in drop for name in names])
                table = pa.Table.from_arrays(columns, schema=schema).filter(kept)
                writer.write_table(table)
                count += len(table)
                bar.update(len(batch))
    return count


def write_rows(rows: Iterator[dict[str, Any]], path: Path) -> int:
    """Writes rows in this package's columns; those that no row has are left out.

    Returns:
        The number of rows.

    Raises:
        UserError: the file ends in .parquet, and some rows are texts and others chat messages.
    """

    def plain(row: dict[str, Any]) -> dict[str, Any]:
        chat = row.pop("chat")
        for name in ("prompt", "chosen", "rejected", "augmented_prompt"):
            if chat and row[name] is not None:
                row[name] = decode_messages(row[name])
        return {name: value for name, value in row.items() if value is not None}

    if path.suffix != ".parquet":
        return _write_json((plain(dict(row)) for row in rows), path)
    found = [dict(row) for row in rows]
    chat = {row["chat"] for row in found}
    if len(chat) > 1:
        raise UserError(
            f"cleaned is {path}, but Parquet cannot hold texts and chat messages in one column; give a file "
            "ending in .jsonl."
        )
    kinds = PREFERENCES.features.arrow_schema
    text = _MESSAGES if chat == {True} else pa.string()
    plain_rows = [plain(row) for row in found]
    names = [name for name in kinds.names if any(name in row for row in plain_rows)]
    texts = ("prompt", "chosen", "rejected", "augmented_prompt")
    schema = pa.schema([(name, text if name in texts else kinds.field(name).type) for name in names])
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(plain_rows, schema), temporary)
    return len(found)
