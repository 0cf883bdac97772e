"""Files of augmented prompts."""

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

from pacmr_lightning.errors import UserError, first_line
from pacmr_lightning.files import local_path, replacing

from ..row_values import values_of

_READ = ("prompt", "augmented_prompt")
_IDS = "pair_ids"
RULES = "rules"
"""Method of rule-based rewording."""


@dataclass(frozen=True)
class AugmentedPrompt:
    """A distinct training prompt and its augmentation."""

    prompt: str
    """A text, or a conversation as JSON."""
    chat: bool
    category: str | None
    """Category of the first pair with the prompt."""
    pairs: int
    """Number of pairs with the prompt."""
    augmented: str = ""
    """As ``prompt``; equal to it if nothing changed."""
    pieces: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    """Number of unchanged pieces by reason."""
    ids: tuple[str, ...] = ()
    """Ids of these pairs."""


@dataclass(frozen=True)
class Augmentations:
    """Augmented prompts of training pairs, as ``pacmr augment`` writes them."""

    prompts: dict[str, str]
    """By prompt."""
    pairs: frozenset[str] | None = None
    """Ids of the pairs that have them; None for all pairs of these prompts."""
    by_rules: frozenset[str] = frozenset()
    """Prompts that rules reworded, of ``prompts``."""

    def of(self, id: str, prompt: str) -> str:
        """Return a pair's augmented prompt, or the prompt itself if it has none."""
        return self.prompts.get(prompt, prompt) if self.pairs is None or id in self.pairs else prompt


def training_prompts(rows: Dataset) -> list[AugmentedPrompt]:
    """Return the distinct prompts of a ``Source``'s usable rows, in order of first appearance."""
    ids: dict[str, list[str]] = {}
    first: dict[str, tuple[bool, str | None]] = {}
    columns = values_of(rows, "id", "prompt", "reason", "chat", "category")
    for name, prompt, reason, chat, category in columns:
        if reason is None and prompt.strip():
            ids.setdefault(prompt, []).append(name)
            first.setdefault(prompt, (chat, category))
    return [AugmentedPrompt(text, *first[text], len(own), ids=tuple(own)) for text, own in ids.items()]


def prompt_hash(prompt: str) -> str:
    """Return 16 hexadecimal digits of BLAKE2b."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()


def write_augmentations(
    path: str | Path,
    rows: Sequence[AugmentedPrompt],
    method: str,
    settings: dict[str, Any],
    only_these_pairs: bool = False,
) -> None:
    """Write Parquet atomically, one row per prompt.

    With ``only_these_pairs``, other pairs of the prompts do not get them.
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
    if only_these_pairs:
        table = table.append_column(_IDS, pa.array([row.ids for row in rows], pa.list_(pa.string())))
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def read_augmentations(path: str | Path) -> Augmentations:
    """Return the augmented prompts of a Parquet file.

    Columns are ``prompt``, ``augmented_prompt``, maybe ``method`` (``RULES``, or another) and, for some of a
    prompt's pairs alone, ``pair_ids``.
    """
    path = local_path(path)
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
            ids, methods = (
                file.read([name])[name].to_pylist() if name in names else None for name in (_IDS, "method")
            )
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read as Parquet with texts ({first_line(error)}); name a "
            "file that pacmr augment wrote."
        ) from None
    both = zip(*(columns[name].to_pylist() for name in _READ), strict=True)
    found = {prompt: augmented for prompt, augmented in both if prompt is not None and augmented is not None}
    if not found:
        raise UserError(f"{path} holds no augmented prompts; write it again with pacmr augment.")
    pairs = None if ids is None else frozenset(name for own in ids for name in own or ())
    made = zip(columns["prompt"].to_pylist(), methods or (), strict=methods is not None)
    return Augmentations(found, pairs, frozenset(prompt for prompt, method in made if method == RULES))
