"""Files of augmented prompts, as ``pacmr augment`` writes them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing

from ..prompts import split_row
from ..rows import values_of

METADATA = b"pacmr_augment"
"""Key of the settings in the file's own metadata."""
_READ = ("prompt", "augmented_prompt")


@dataclass(frozen=True)
class AugmentedPrompt:
    """A distinct prompt of training pairs, and the same in other words."""

    prompt: str
    """A text, or a conversation as JSON."""
    chat: bool
    category: str | None
    """That of the first pair that has the prompt."""
    pairs: int
    """Training pairs that have the prompt."""
    augmented: str = ""
    """As ``prompt``; the prompt itself where nothing came out differently."""
    pieces: int = 0
    """Pieces that were to be worded differently."""
    kept: Counter[str] = field(default_factory=Counter)
    """How many of them were kept as they are, by reason."""


def training_prompts(rows: Dataset) -> list[AugmentedPrompt]:
    """Return the distinct prompts of the usable rows of a ``Source``, in the order of their first rows."""
    pairs: Counter[str] = Counter()
    first: dict[str, tuple[bool, str | None]] = {}
    columns = values_of(rows, "prompt", "chosen", "rejected", "chat", "category")
    for prompt, chosen, rejected, chat, category in columns:
        split = split_row(prompt, chosen, rejected, chat)
        if split.reason is None and split.prompt.strip():
            pairs[split.prompt] += 1
            first.setdefault(split.prompt, (chat, category))
    return [AugmentedPrompt(text, *first[text], count) for text, count in pairs.items()]


def prompt_hash(prompt: str) -> str:
    """Return 16 hexadecimal digits of BLAKE2b."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()


def write_augmentations(
    path: str | Path, rows: Sequence[AugmentedPrompt], method: str, settings: dict[str, Any]
) -> None:
    """Write Parquet with a row a prompt, whole or not at all.

    Columns: ``prompt_hash``, ``prompt``, ``augmented_prompt``, ``category``, ``pairs``, ``method`` and
    ``settings`` (JSON); method and settings are also the file's metadata under ``pacmr_augment``.
    """
    texts = {
        "prompt_hash": [prompt_hash(row.prompt) for row in rows],
        "prompt": [row.prompt for row in rows],
        "augmented_prompt": [row.augmented for row in rows],
        "category": [row.category for row in rows],
        "method": [method] * len(rows),
        "settings": [json.dumps(settings, sort_keys=True)] * len(rows),
    }
    table = pa.table(texts, schema=pa.schema([(name, pa.string()) for name in texts]))
    table = table.add_column(4, "pairs", pa.array([row.pairs for row in rows], pa.int64()))
    about = json.dumps({"method": method, "settings": settings}, sort_keys=True)
    table = table.replace_schema_metadata({METADATA: about.encode()})
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def read_augmentations(path: str | Path) -> dict[str, str]:
    """Return the augmented prompt by prompt, also where the two are equal; prompts without one are left out.

    Args:
        path: Parquet with the columns ``prompt`` and ``augmented_prompt``, one row a prompt; others are not
            read. Conversations are JSON lists of messages.

    Raises:
        UserError: there is no such file, it is no Parquet, or it lacks a column or any row.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"There is no file {path} with augmented prompts; write one with pacmr augment.")
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for name in _READ:
                if name not in names:
                    raise UserError(
                        f"{path} has no column {name!r} (columns found: {', '.join(names) or 'none'}); name "
                        "a file that pacmr augment wrote."
                    )
            columns = file.read(list(_READ)).select(_READ).cast(pa.schema([(n, pa.string()) for n in _READ]))
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read as Parquet with texts ({str(error).splitlines()[0].rstrip('.')}); name a "
            "file that pacmr augment wrote."
        ) from None
    pairs = zip(*(columns[name].to_pylist() for name in _READ), strict=True)
    found = {prompt: augmented for prompt, augmented in pairs if prompt is not None and augmented is not None}
    if not found:
        raise UserError(f"{path} holds no augmented prompts; write it again with pacmr augment.")
    return found
