"""The Markdown report of ``pacmr augment``."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from .augmented_prompts import AugmentedPrompt
from .structure import texts_of

EXAMPLES = 6
_ESCAPED = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_<>[]|#"})


def summary(rows: Sequence[AugmentedPrompt], about: str) -> str:
    """Return statistics of the prompts as Markdown, headed by ``about``."""
    pairs, pieces = sum(row.pairs for row in rows), sum(row.pieces for row in rows)
    identical = sum(row.prompt == row.augmented for row in rows)
    kept = sum((row.kept for row in rows), Counter[str]())
    ratios = [len(row.augmented) / len(row.prompt) for row in rows]
    lines = [
        "# Augmented prompts",
        "",
        f"{about[0].upper()}{about[1:]}, which {pairs:,} pairs have.",
        "",
        f"- equal to the prompt, so that its pairs are in no meta-batch: {_share(identical, len(rows))}",
        "- characters over those of the prompt, median (5% to 95%): {:.2f} ({:.2f} to {:.2f})".format(
            *np.quantile(ratios, (0.5, 0.05, 0.95))
        ),
        f"- pieces with words that were left as they were: {_share(kept.total(), pieces)}",
        *(f"  - {why}: {_share(count, pieces)}" for why, count in kept.most_common()),
    ]
    return "\n".join(lines) + "\n"


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
        lines += [f"### {number}" + (f" ({row.category})" if row.category else ""), ""]
        lines += ["| before | after |", "| --- | --- |"]
        for before, after in zip_longest(*sides, fillvalue=""):
            lines.append(f"| {before.translate(_ESCAPED)} | {after.translate(_ESCAPED)} |")
        lines.append("")
    return "\n".join(lines)


def _share(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.1%})" if total else "-"
