"""Rows of a ``datasets.Dataset``, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datasets import Dataset

from .prompts import split_row


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
