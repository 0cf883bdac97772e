"""The Markdown report of ``pacmr augment``."""

import random
from collections import Counter
from collections.abc import Sequence
from textwrap import indent

import numpy as np

from .augmented_prompts import AugmentedPrompt
from .structure import texts_of

EXAMPLES = 6


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
    text = "\n## Examples\n"
    for number, row in enumerate(random.Random(seed).sample(changed, min(EXAMPLES, len(changed))), 1):
        text += f"\n### {number}" + (f" ({row.category})" if row.category else "") + "\n"
        for title, prompt in (("before", row.prompt), ("after", row.augmented)):
            lines = "\n".join(texts_of(prompt, row.chat)).strip()
            text += f"\n{title}:\n\n{indent(lines, '    ')}\n"
    return text


def _share(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.1%})" if total else "-"
