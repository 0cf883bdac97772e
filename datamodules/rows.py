"""Values of a ``datasets.Dataset``, read a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datasets import Dataset

from .prompts import split_row


def values_of(rows: Dataset, *names: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of some columns row by row, read in batches for speed and memory."""
    for batch in rows.select_columns(list(names)).iter(batch_size=1000):
        yield from zip(*(batch[name] for name in names), strict=True)


def prompts_of(rows: Dataset) -> Iterator[str]:
    """Yield the prompts of pairs; unusable rows have the empty prompt."""
    for row in values_of(rows, "prompt", "chosen", "rejected", "chat"):
        yield split_row(*row).prompt
