"""Second wordings of prompts as ``pacmr augment`` writes them, and how they are read."""

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

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing

METADATA = b"pacmr_augment"
"""Key of the settings in the file's own metadata."""
_READ = ("prompt", "augmented_prompt")


@dataclass(frozen=True)
class AugmentedPrompt:
    """A prompt in other words."""

    prompt: str
    """A text, or a conversation as JSON."""
    augmented: str
    """Likewise; the prompt itself where nothing came out differently."""
    chat: bool
    category: str | None
    pairs: int
    """Training pairs that have the prompt."""
    pieces: int
    """Pieces that were to be worded differently."""
    kept: Counter[str] = field(default_factory=Counter)
    """How many of them were kept as they are, by reason."""


def prompt_hash(prompt: str) -> str:
    """16 hexadecimal digits of BLAKE2b."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()


def write_augmentations(
    path: str | Path, rows: Sequence[AugmentedPrompt], method: str, settings: dict[str, Any]
) -> None:
    """Writes Parquet with a row a prompt, whole or not at all.

    Columns: ``prompt_hash``, ``prompt``, ``augmented_prompt``, ``category``, ``pairs``, ``method`` and
    ``settings`` (JSON); method and settings are also the file's metadata under ``pacmr_augment``.
    """
    how = json.dumps(settings, sort_keys=True)
    columns = {
        "prompt_hash": [prompt_hash(row.prompt) for row in rows],
        "prompt": [row.prompt for row in rows],
        "augmented_prompt": [row.augmented for row in rows],
        "category": [row.category for row in rows],
        "pairs": [row.pairs for row in rows],
        "method": [method] * len(rows),
        "settings": [how] * len(rows),
    }
    texts = [(name, pa.string()) for name in columns if name != "pairs"]
    schema = pa.schema([*texts[:4], ("pairs", pa.int64()), *texts[4:]])
    about = json.dumps({"method": method, "settings": settings}, sort_keys=True)
    table = pa.table(columns, schema=schema.with_metadata({METADATA: about.encode()}))
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def read_augmentations(path: str | Path) -> dict[str, str]:
    """The second wording of each prompt of a file.

    Args:
        path: Parquet with the columns ``prompt`` and ``augmented_prompt``, one row a prompt; others are not
            read. Conversations are JSON lists of messages.

    Returns:
        The augmented prompt by prompt, also where the two are equal; prompts without one are left out.

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
