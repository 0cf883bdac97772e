"""Reddit TL;DR: comparisons of summaries, and reference summaries for SFT."""

from __future__ import annotations

import re
from typing import Any

from datasets import Dataset

from .columns import PREFERENCES, SFT
from .hub import convert, load_split
from .sources import Completions, Source
from .splits import RowsBySplit, SplitPlaces

_POST = re.compile(
    r"SUBREDDIT: (?P<subreddit>[^\n]*)\s+TITLE: (?P<title>[^\n]*)\s+POST: (?P<post>.*?)\s*TL;DR:\s*",
    re.DOTALL,
)


class TLDR(RowsBySplit, Source):
    """The TL;DR comparisons in TRL's layout, as plain texts.

    Upstream, ``prompt`` is a text (``SUBREDDIT: r/...``, ``TITLE: ...``, ``POST: ...``, ``TL;DR:``) and
    ``chosen`` and ``rejected`` are conversations that repeat it; a pair here is the post and two summaries,
    each with a space before it. The subreddit is the category. 92,858 training pairs, 83,802 validation pairs
    (splits ``train`` and ``validation``; 2,284 more, about news articles, in ``validation_cnndm``).

    Args:
        path: Hub id, or a folder in its layout.
        validation_split: the split with the validation pairs.
    """

    columns = PREFERENCES
    name = "TL;DR"

    def __init__(
        self,
        path: str = "trl-internal-testing/tldr-preference-trl-style",
        validation_split: str = "validation",
    ):
        self.path = path
        self.splits = SplitPlaces("train", validation_split)

    def read(self, place: str) -> Dataset:
        """The pairs of an upstream split."""
        parts = [(f"{self.path} {place}", load_split(self.path, place))]
        return convert(parts, PREFERENCES, _pair, self.path, "tldr 1")


class TLDRCompletions(RowsBySplit, Completions):
    """Posts and their authors' summaries, written as the prompts and responses of ``TLDR``.

    Upstream, the parts of a post are separated by one newline instead of two, and the column ``label`` holds
    the summary without a space before it; a model that is tuned on that would see another prompt when it is
    trained on comparisons. 116,722 training, 6,447 validation and 6,553 test rows.

    Args:
        path: Hub id, or a folder in its layout.
    """

    columns = SFT
    name = "TL;DR summaries"
    splits = SplitPlaces("train", "valid")

    def __init__(self, path: str = "CarperAI/openai_summarize_tldr"):
        self.path = path

    def read(self, place: str) -> Dataset:
        """The rows of an upstream split."""
        parts = [(f"{self.path} {place}", load_split(self.path, place))]
        return convert(parts, SFT, _demonstration, self.path, "tldr 1")


def _pair(part: str, row: dict[str, Any]) -> dict[str, Any]:
    prompt, subreddit = _frame(row.get("prompt"))
    sides = {side: _summary(row.get(side)) for side in ("chosen", "rejected")}
    return {"prompt": prompt, "category": subreddit} | sides


def _demonstration(part: str, row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": _frame(row.get("prompt"))[0], "completion": _summary(row.get("label"))}


def _frame(prompt: object) -> tuple[object, str | None]:
    """The post in the layout of the comparisons, and its subreddit; anything else as it is."""
    found = _POST.fullmatch(prompt) if isinstance(prompt, str) else None
    if not found:
        return prompt, None
    text = "SUBREDDIT: {subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:".format(**found.groupdict())
    return text, found["subreddit"]


def _summary(value: object) -> object:
    """The last message's text, after one space; what is no text is left for the checks to refuse."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    return f" {value.strip()}" if isinstance(value, str) and value.strip() else value
