"""Files of augmented prompts."""

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
from pacmr_lightning.files import replacing, text_hash

from ..columns import text_of
from ..reading import numbered_rows, values_of

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
    ids: tuple[str, ...]
    """Ids of the pairs with the prompt."""
    augmented: str = ""
    """As ``prompt``; equal to it if nothing changed."""
    pieces: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    """Number of unchanged pieces by reason."""


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
    prompts: dict[str, tuple[bool, str | None, list[str]]] = {}
    columns = values_of(rows, "id", "prompt", "reason", "chat", "category")
    for name, prompt, reason, chat, category in columns:
        if reason is None and prompt.strip():
            prompts.setdefault(prompt, (chat, category, []))[2].append(name)
    return [
        AugmentedPrompt(text, chat, category, tuple(ids)) for text, (chat, category, ids) in prompts.items()
    ]


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
    columns: dict[str, Any] = {
        "prompt_hash": [text_hash(row.prompt) for row in rows],
        "prompt": [row.prompt for row in rows],
        "augmented_prompt": [row.augmented for row in rows],
        "category": pa.array([row.category for row in rows], pa.string()),
        "pairs": [len(row.ids) for row in rows],
        "method": [method] * len(rows),
        "settings": [json.dumps(settings, sort_keys=True)] * len(rows),
    }
    if only_these_pairs:
        columns[_IDS] = [row.ids for row in rows]
    with replacing(path) as temporary:
        pq.write_table(pa.table(columns), temporary)


def read_augmentations(path: str | Path) -> Augmentations:
    """Return the augmented prompts of a file, as ``write_augmentations`` writes it.

    Columns are ``prompt``, ``augmented_prompt``, maybe ``method`` (``RULES``, or another) and, for some of a
    prompt's pairs alone, ``pair_ids``.
    """
    prompts, by_rules = dict[str, str](), set[str]()
    pairs: set[str] | None = None
    for place, row in numbered_rows(path, ("prompt", "augmented_prompt", "method", _IDS)):
        prompt, augmented = row.get("prompt"), row.get("augmented_prompt")
        if prompt is None or augmented is None:
            continue
        prompts[text_of(row, "prompt", place)] = text_of(row, "augmented_prompt", place)
        if _IDS in row:
            pairs = (pairs or set()).union(row[_IDS] or ())
        if row.get("method") == RULES:
            by_rules.add(prompt)
    if not prompts:
        raise UserError(f"{path} holds no augmented prompts; name a file that pacmr augment wrote.")
    return Augmentations(prompts, None if pairs is None else frozenset(pairs), frozenset(by_rules))
