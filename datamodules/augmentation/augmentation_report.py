"""The Markdown report of ``pacmr augment``."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import pandas as pd
from torch import Tensor
from torchmetrics.text import CHRFScore
from tqdm import tqdm

from .augmented_prompts import AugmentedPrompt
from .structure import cut, texts_of

CATEGORIES = 20
EXAMPLES = 6
CHRF_SAMPLE = 64
"""Prompts in the chrF sample: torchmetrics takes half a second for each."""
_HEADINGS = ["category", "prompts", "pairs", "identical", "length ratio", "kept pieces"]


def summary(rows: Sequence[AugmentedPrompt], about: str) -> str:
    """Return statistics of all prompts and the largest categories as Markdown, headed by ``about``."""
    table = pd.DataFrame(
        {
            "category": ["(none)" if row.category is None else row.category for row in rows],
            "pairs": [row.pairs for row in rows],
            "identical": [row.prompt == row.augmented for row in rows],
            "ratio": [_ratio(row) for row in tqdm(rows, desc="Comparing", unit="prompt", leave=False)],
            "pieces": [row.pieces for row in rows],
            "kept": [row.kept.total() for row in rows],
        }
    )
    categories = table.groupby("category", sort=False)
    largest = categories.size().sort_values(ascending=False, kind="stable").index[:CATEGORIES]
    lines = [["all", *_cells(table)]]
    if len(categories) > 1:
        lines += [[name, *_cells(categories.get_group(name))] for name in largest]
    kept = sum((row.kept for row in rows), Counter[str]())
    pieces = table["pieces"].sum()
    text = [
        "# Augmented prompts",
        "",
        f"{about[0].upper()}{about[1:]}, which {table['pairs'].sum():,} pairs have.",
        "",
        *_markdown(_HEADINGS, lines),
        "",
    ]
    if len(categories) > len(largest):
        text += [f"{len(categories) - len(largest)} smaller categories are not listed.", ""]
    text += [
        "- identical: the augmented prompt equals the prompt; such pairs are never in a meta-batch",
        "- length ratio: characters of the augmented prompt over those of the prompt, median (5% to 95%)",
        f"- chrF, similarity of the two: {_chrf(rows):.2f} (1 is the same text), of "
        f"{min(CHRF_SAMPLE, len(rows))} prompts; this and the ratio without the frame",
        f"- kept pieces: left as they were, of {pieces:,} pieces with words",
        *(f"  - {why}: {_share(count, pieces)}" for why, count in kept.most_common()),
    ]
    return "\n".join(text) + "\n"


def examples(rows: Sequence[AugmentedPrompt], seed: int) -> str:
    """Return a seeded sample of changed prompts, before and after, as Markdown."""
    changed = [row for row in rows if row.prompt != row.augmented]
    taken = random.Random(seed).sample(changed, min(EXAMPLES, len(changed)))
    lines = ["", "## Examples", ""]
    for number, row in enumerate(taken, 1):
        sides = (
            [line for text in texts_of(prompt, row.chat) for line in text.splitlines() if line.strip()]
            for prompt in (row.prompt, row.augmented)
        )
        pairs = [list(pair) for pair in zip_longest(*sides, fillvalue="")]
        lines += [f"### {number}" + (f" ({row.category})" if row.category else ""), ""]
        lines += [*_markdown(["before", "after"], pairs, padded=False), ""]
    return "\n".join(lines)


def _cells(table: pd.DataFrame) -> list[str]:
    ratio = "-"
    if table["ratio"].notna().any():
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*table["ratio"].quantile([0.5, 0.05, 0.95]))
    return [
        f"{len(table):,}",
        f"{table['pairs'].sum():,}",
        _share(table["identical"].sum(), len(table)),
        ratio,
        _share(table["kept"].sum(), table["pieces"].sum()),
    ]


def _ratio(row: AugmentedPrompt) -> float | None:
    before, after = (len(_content(text, row.chat)) for text in (row.prompt, row.augmented))
    return after / before if before else None


def _chrf(rows: Sequence[AugmentedPrompt]) -> float:
    score = CHRFScore(n_word_order=0)
    for row in random.Random(0).sample(list(rows), min(CHRF_SAMPLE, len(rows))):
        score.update([_content(row.augmented, row.chat)], [[_content(row.prompt, row.chat)]])
    mean = score.compute()
    assert isinstance(mean, Tensor)  # a tuple only with sentence-level scores
    return float(mean)


def _content(prompt: str, chat: bool) -> str:
    return " ".join(part.text for text in texts_of(prompt, chat) for part in cut(text) if part.content)


def _share(count: float, total: float) -> str:
    return f"{count:,} ({count / total:.1%})" if total else "-"


def _markdown(headings: list[str], rows: list[list[str]], padded: bool = True) -> list[str]:
    escaped = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_<>[]|#"})
    cells = [headings, *([cell.translate(escaped) for cell in row] for row in rows)]
    widths = [max(map(len, column)) if padded else 3 for column in zip(*cells, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return [f"| {' | '.join(line)} |" for line in [lines[0], ["-" * width for width in widths], *lines[1:]]]
