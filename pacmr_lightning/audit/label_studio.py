"""Pairs as tasks of Label Studio, and the decisions of its JSON export.

By its documented task format (``data``, ``annotations``, ``result``), as Label Studio 1.x exports it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from .listed_pairs import Texts

CONTROL = "decision"
"""Name of the control in the labelling config, which docs/audit.md shows."""


def tasks(pairs: Iterable[tuple[str, str, bool, Texts]]) -> list[dict[str, Any]]:
    """One task a pair, which says nothing of what an audit makes of it.

    Args:
        pairs: id, which of the row's responses is the chosen one in training, whether the pair was drawn at
            random, and texts.
    """
    return [
        {
            "data": {
                "pair": name,
                "observed": observed,
                "sample": sample,
                "prompt": texts.prompt,
                "chosen": texts.chosen,
                "rejected": texts.rejected,
            }
        }
        for name, observed, sample, texts in pairs
    ]


def exported(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Decisions of an export, each with the place it stands at; what was skipped or left open has none.

    Raises:
        UserError: it is no export of tasks that ``tasks`` has made.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits, or lists without end
        if not isinstance(error, json.JSONDecodeError):
            raise UserError(f"{path} is not JSON that can be read ({error}); export it again.") from None
        raise UserError(
            f"{path} is not JSON ({error.msg} in line {error.lineno}); export it again, as JSON."
        ) from None
    for number, task in enumerate(found, 1):
        place = f"{path}, task {number}"
        try:
            pair = {"id": task["data"]["pair"]}
            pair |= {name: task["data"][name] for name in ("observed", "sample") if name in task["data"]}
            words = [
                word
                for annotation in task["annotations"]
                if not annotation.get("was_cancelled")
                for result in annotation["result"]
                if result.get("from_name") == CONTROL
                for word in result["value"]["choices"]
            ]
        except (AttributeError, KeyError, TypeError):
            raise UserError(
                f"{place} has no data.pair with annotations; export tasks of pacmr audit --label_studio from "
                "Label Studio as JSON, not JSON-MIN."
            ) from None
        yield from ((place, {**pair, "decision": word}) for word in words)
