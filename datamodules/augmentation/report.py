"""What ``pacmr augment`` did to the prompts, as Markdown: numbers for all and by category, and examples."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from torch import Tensor
from torchmetrics.text import CHRFScore
from tqdm import tqdm

from .files import AugmentedPrompt
from .structure import cut, texts_of

CATEGORIES = 20
"""Categories with a row of their own, the largest ones."""
EXAMPLES = 6
CHRF_SAMPLE = 64
"""Prompts that chrF is computed of: torchmetrics takes half a second for each."""


class _Numbers:
    """What the report says of some prompts."""

    def __init__(self) -> None:
        self.prompts = self.pairs = self.identical = self.pieces = 0
        self.ratios: list[float] = []
        self.kept: Counter[str] = Counter()

    def add(self, row: AugmentedPrompt, ratio: float | None) -> None:
        self.prompts += 1
        self.pairs += row.pairs
        self.identical += row.prompt == row.augmented
        self.pieces += row.pieces
        self.kept += row.kept
        self.ratios += [] if ratio is None else [ratio]

    @property
    def ratio(self) -> str:
        if not self.ratios:
            return "-"
        middle, low, high = np.quantile(self.ratios, (0.5, 0.05, 0.95))
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    @property
    def cells(self) -> list[str]:
        return [
            f"{self.prompts:,}",
            f"{self.pairs:,}",
            _share(self.identical, self.prompts),
            self.ratio,
            _share(self.kept.total(), self.pieces),
        ]


def summary(rows: Sequence[AugmentedPrompt], about: str) -> str:
    """The numbers.

    Args:
        rows: the prompts.
        about: what was done to how many of them.

    Returns:
        Markdown: pairs covered, identical prompts, the ratio of lengths and what was kept, for all and for
        the largest categories; why it was kept, and chrF of a sample.
    """
    everything = _Numbers()
    by_category: defaultdict[str | None, _Numbers] = defaultdict(_Numbers)
    for row in tqdm(rows, desc="Comparing", unit="prompt", leave=False):
        before, after = (_content(text, row.chat) for text in (row.prompt, row.augmented))
        ratio = len(after) / len(before) if before else None
        for numbers in (everything, by_category[row.category]):
            numbers.add(row, ratio)
    headings = ["prompts", "pairs", "identical", "length ratio", "kept pieces"]
    largest = sorted(by_category, key=lambda category: -by_category[category].prompts)[:CATEGORIES]
    table = [["all", *everything.cells]]
    if len(by_category) > 1:
        table += [["(none)" if c is None else c, *by_category[c].cells] for c in largest]
    lines = [
        "# Augmented prompts",
        "",
        f"{about[0].upper()}{about[1:]}, which {everything.pairs:,} pairs have.",
        "",
        *_table(["category", *headings], table),
        "",
    ]
    if len(by_category) > len(largest):
        lines += [f"{len(by_category) - len(largest)} smaller categories are not listed.", ""]
    lines += [
        "- identical: the second wording is the first; such prompts have no second view in training",
        "- length ratio: characters of the second wording over those of the first, median (5% to 95%)",
        f"- chrF, how alike the two are: {_chrf(rows):.2f} (1 is the same text), of "
        f"{min(CHRF_SAMPLE, len(rows))} prompts; this and the ratio without the frame",
        f"- kept pieces: left as they were, of {everything.pieces:,} pieces with words",
        *(f"  - {why}: {_share(count, everything.pieces)}" for why, count in everything.kept.most_common()),
    ]
    return "\n".join(lines) + "\n"


def examples(rows: Sequence[AugmentedPrompt], seed: int) -> str:
    """Some prompts that came out differently, before and after, as Markdown; the same ones for a seed."""
    changed = [row for row in rows if row.prompt != row.augmented]
    taken = random.Random(seed).sample(changed, min(EXAMPLES, len(changed)))
    lines = ["", "## Examples", ""]
    for number, row in enumerate(taken, 1):
        sides = [_lines(text, row.chat) for text in (row.prompt, row.augmented)]
        pairs = [list(pair) for pair in zip_longest(*sides, fillvalue="")]
        lines += [f"### {number}" + (f" ({row.category})" if row.category else ""), ""]
        lines += [*_table(["before", "after"], pairs, padded=False), ""]
    return "\n".join(lines)


def _chrf(rows: Sequence[AugmentedPrompt]) -> float:
    """Corpus-level chrF of a sample's contents, in [0, 1]."""
    score = CHRFScore(n_word_order=0)
    for row in random.Random(0).sample(list(rows), min(CHRF_SAMPLE, len(rows))):
        score.update([_content(row.augmented, row.chat)], [[_content(row.prompt, row.chat)]])
    mean = score.compute()
    assert isinstance(mean, Tensor)  # a tuple comes with the sentences' own scores only
    return float(mean)


def _content(prompt: str, chat: bool) -> str:
    return " ".join(part.text for text in texts_of(prompt, chat) for part in cut(text) if part.content)


def _lines(prompt: str, chat: bool) -> list[str]:
    return [line for text in texts_of(prompt, chat) for line in text.splitlines() if line.strip()]


def _share(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.1%})" if total else "-"


def _table(headings: list[str], rows: list[list[str]], padded: bool = True) -> list[str]:
    cells = [headings, *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) if padded else 3 for column in zip(*cells, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return [f"| {' | '.join(line)} |" for line in [lines[0], ["-" * width for width in widths], *lines[1:]]]


def _cell(text: str) -> str:
    """Text that stays one cell of a Markdown table, and plain."""
    for sign in "\\`*_<>[]|#":
        text = text.replace(sign, f"\\{sign}")
    return text
