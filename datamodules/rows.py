"""Rows of a ``datasets.Dataset``, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from pyarrow import compute

from pacmr_lightning.evaluation.conversation import message_text

from .chat import decode_messages
from .prompts import split_row

PART = 10_000
"""Rows whose tokens are looked at together: all of a large dataset need not fit into memory."""


def values_of(rows: Dataset, *names: str) -> Iterator[tuple[Any, ...]]:
    """The values of some columns, row by row.

    In batches, for a column that is iterated over decodes every row by itself, at a tenth of the speed, and
    one that is read whole does not stay on disk.
    """
    for batch in rows.select_columns(list(names)).iter(batch_size=1000):
        yield from zip(*(batch[name] for name in names), strict=True)


def prompts_of(rows: Dataset) -> Iterator[str]:
    """The prompts of pairs; unusable ones have the empty prompt."""
    for row in values_of(rows, "prompt", "chosen", "rejected", "chat"):
        yield split_row(*row).prompt


def readable_texts(rows: Dataset, ids: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Prompt, chosen and rejected of pairs as a person reads them, labels as found, by their ids."""
    places = {name: i for i, name in enumerate(rows["id"][:])}
    # One read of them all: a row at a time takes several times as long.
    found = rows.select([places[name] for name in ids]).to_dict()
    columns = (found[name] for name in ("prompt", "chosen", "rejected", "chat", "tools"))
    for prompt, chosen, rejected, chat, tools in zip(*columns, strict=True):
        split = split_row(prompt, chosen, rejected, chat)
        said = split.prompt
        if chat:
            said = "\n\n".join(f"{m['role']}: {message_text(m)}" for m in decode_messages(said))
            said = f"tools: {tools}\n\n{said}" if tools else said
        yield said, split.chosen, split.rejected


def token_parts(rows: Dataset, *columns: str) -> Iterator[list[pa.ListArray]]:
    """Yield parts of the rows: for each of some columns of token ids the lists of the part's rows."""
    for part in rows.select_columns(list(columns)).with_format("arrow").iter(PART):
        yield [part[name].combine_chunks() for name in columns]


def token_counts(lists: pa.ListArray) -> np.ndarray:
    """Return the (n,) int64 numbers of tokens in n lists."""
    return compute.list_value_length(lists).to_numpy().astype(np.int64)


def extent(
    rows: Dataset, columns: tuple[str, ...], length: Callable[..., np.ndarray]
) -> tuple[np.ndarray, int]:
    """Return the (N,) lengths of rows, and the largest token id in them.

    Args:
        rows: N rows.
        columns: of token ids.
        length: makes (n,) lengths of the (n,) numbers of tokens in each column.
    """
    lengths, largest = [], 0
    for lists in token_parts(rows, *columns):
        lengths.append(length(*map(token_counts, lists)))
        ids = [compute.max(column.flatten()).as_py() for column in lists]
        largest = max(largest, *(token for token in ids if token is not None))
    return np.concatenate(lengths), largest
