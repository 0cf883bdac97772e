"""Lengths, largest ids and hashes of columns of token ids."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from pyarrow import compute
from transformers import PreTrainedModel

from pacmr_lightning.policy.limits import check_tokens


def token_parts(rows: Dataset, *columns: str) -> Iterator[tuple[list[pa.ListArray], list[np.ndarray]]]:
    """Yield, in parts that fit into memory, each column's lists of ids and their (n,) int64 lengths."""
    for part in rows.select_columns(list(columns)).with_format("arrow").iter(10_000):
        lists = [part[name].combine_chunks() for name in columns]
        yield lists, [compute.list_value_length(column).to_numpy().astype(np.int64) for column in lists]


def row_bytes(rows: Dataset, *columns: str) -> Iterator[list[bytes]]:
    """Yield each row's ids in each column, as bytes that can be compared."""
    for lists, counts in token_parts(rows, *columns):
        parts = [
            np.split(column.flatten().to_numpy(), np.cumsum(sizes)[:-1])
            for column, sizes in zip(lists, counts, strict=True)
        ]
        yield from ([part.tobytes() for part in row] for row in zip(*parts, strict=True))


def row_lengths(rows: Dataset, *columns: str) -> np.ndarray:
    """Return (N,) int64 tokens of each row over all columns."""
    lengths = (np.sum(counts, axis=0) for _, counts in token_parts(rows, *columns))
    return np.concatenate([np.empty(0, np.int64), *lengths])


def lengths_and_digest(rows: Dataset, *columns: str) -> tuple[np.ndarray, str]:
    """Return (N,) tokens of each row over all columns, and a hash of all tokens in their order."""
    digest = hashlib.sha256()
    lengths = [np.empty(0, np.int64)]
    for lists, counts in token_parts(rows, *columns):
        for column, count in zip(lists, counts, strict=True):
            digest.update(count.tobytes())
            digest.update(column.flatten().to_numpy().tobytes())
        lengths.append(np.sum(counts, axis=0))
    return np.concatenate(lengths), digest.hexdigest()


def tokens_digest(rows: Dataset, *columns: str) -> str:
    """Return a hash of the tokens of all rows, in their order."""
    return lengths_and_digest(rows, *columns)[1]


def check_readable(
    name: str,
    model: PreTrainedModel,
    rows: Dataset,
    columns: tuple[str, ...],
    length: Callable[..., Any],
    pad_id: int,
) -> None:
    """Raise a UserError if a model has too few positions (for (n,) ``length`` of columns) or embeddings."""
    lengths, largest = [], pad_id
    for lists, counts in token_parts(rows, *columns):
        lengths.append(length(*counts))
        ids = [compute.max(column.flatten()).as_py() for column in lists]
        largest = max(largest, *(token for token in ids if token is not None))
    check_tokens(name, model, np.concatenate(lengths), largest)
