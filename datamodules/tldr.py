"""Reddit TL;DR: comparisons of summaries, and reference summaries for SFT."""

import re
from functools import cached_property
from typing import Any

from datasets import Dataset

from .columns import PREFERENCES, SFT
from .hub import convert, load_split
from .sources import Completions, RowsBySplit, Source, SplitPlaces

_POST = re.compile(
    r"SUBREDDIT: (?P<subreddit>[^\n]*)\s+TITLE: (?P<title>[^\n]*)\s+POST: (?P<post>.*?)\s*TL;DR:\s*",
    re.DOTALL,
)


class TLDR(RowsBySplit, Source):
    """TL;DR comparisons in TRL's layout, as plain texts.

    Upstream, ``chosen`` and ``rejected`` are conversations that repeat the prompt; a pair here is the post
    and two summaries, each after a space. The subreddit is the category. 92,858 training and 83,802
    validation pairs (2,284 more, of news articles, in ``validation_cnndm``).

    Args:
        path: Hub id, or a folder in its layout.
        validation_split: the split with the validation pairs.
        test_prompts: Hub id or folder of ``TLDRCompletions``, whose 6,553 test posts are the prompts for
            evaluation; None for those of the validation pairs.
    """

    columns = PREFERENCES
    name = "TL;DR"

    def __init__(
        self,
        path: str = "trl-internal-testing/tldr-preference-trl-style",
        validation_split: str = "validation",
        test_prompts: str | None = None,
    ):
        self.path = path
        self.files = (path,)
        self.test_prompts = test_prompts
        self.splits = SplitPlaces("train", validation_split)

    def read(self, place: str) -> Dataset:
        """Return the pairs of an upstream split."""
        return convert([(load_split(self.path, place), _pair)], PREFERENCES, self.path, "tldr 1")

    # mypy takes a cached property for a read-only one.
    @cached_property
    def prompts(self) -> list[str] | None:  # type: ignore[override]
        """Distinct prompts of the test split of ``test_prompts``."""
        if self.test_prompts is None:
            return None
        return list(dict.fromkeys(TLDRCompletions(self.test_prompts).read("test")["prompt"][:]))


class TLDRCompletions(RowsBySplit, Completions):
    """Posts and their authors' summaries, in the layout of ``TLDR``.

    Upstream separates the parts of a post by one newline instead of two, and its summaries have no space
    before them. 116,722 training, 6,447 validation and 6,553 test rows.

    Args:
        path: Hub id, or a folder in its layout.
    """

    columns = SFT
    name = "TL;DR summaries"
    splits = SplitPlaces("train", "valid")

    def __init__(self, path: str = "CarperAI/openai_summarize_tldr"):
        self.path = path

    def read(self, place: str) -> Dataset:
        """Return the rows of an upstream split."""
        return convert([(load_split(self.path, place), _demonstration)], SFT, self.path, "tldr 1")


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    prompt, subreddit = _frame(row.get("prompt"))
    sides = {side: _summary(row.get(side)) for side in ("chosen", "rejected")}
    return {"prompt": prompt, "category": subreddit} | sides


def _demonstration(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": _frame(row.get("prompt"))[0], "completion": _summary(row.get("label"))}


def _frame(prompt: object) -> tuple[object, str | None]:
    """Return the post in the layout of the comparisons, and its subreddit; other values as they are."""
    match = _POST.fullmatch(prompt) if isinstance(prompt, str) else None
    if not match:
        return prompt, None
    text = "SUBREDDIT: {subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:".format(**match.groupdict())
    return text, match["subreddit"]


def _summary(value: object) -> object:
    """Return the last message's text after a space; other values as they are, for the checks."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    return f" {value.strip()}" if isinstance(value, str) and value.strip() else value
