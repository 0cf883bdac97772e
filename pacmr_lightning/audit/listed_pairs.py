"""A pair as the report lists it: what it says, what is known of it, and what a decision has to name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from .report_tables import as_text

FOLD = 600
"""Characters of a text that are shown before it has to be unfolded."""
SEED = 0
"""Of the random sample."""


@dataclass(frozen=True)
class Texts:
    """What a pair says, labels as trained."""

    prompt: str
    chosen: str
    rejected: str


def random_sample(ids: Sequence[str], number: int) -> list[str]:
    """Ids of pairs that are drawn at random, whatever any score says of them.

    A larger sample of the same pairs begins with the smaller one, so that reading can go on.
    """
    return [ids[i] for i in np.random.default_rng(SEED).permutation(len(ids))[:number]]


def suspect(row: Any, texts: Texts) -> str:
    """HTML of a pair with what the audit says of it.

    Args:
        row: of ``Findings.pairs``.
        texts: its own.
    """
    facts = [f"#{row.rank}", row.id]
    facts += [] if pd.isna(row.category) else [row.category]
    facts += [] if pd.isna(row.p_wrong) else [f"P(wrong) {row.p_wrong:.3f}"]
    facts.append(f"suggestion: {row.suggested}")
    facts += ["exchanged by the run's noise"] if row.observed == "rejected" else []
    facts.append(f"weight {row.weight:.3f}, u {row.u:.2f}")
    facts += [] if pd.isna(row.cross_fit_u) else [f"cross-fitted u {row.cross_fit_u:.2f}"]
    known = (
        "" if pd.isna(row.flipped) else " · the label is wrong" if row.flipped else " · the label is right"
    )
    told = f"<span{' class=wrong' if known.endswith('wrong') else ''}>{known}</span>"
    return _article(row, texts, False, as_text(" · ".join(facts)) + told)


def sampled(row: Any, texts: Texts, place: int, number: int) -> str:
    """HTML of a pair of the random sample, without a word of what the audit or anybody knows of its label.

    Args:
        row: of ``Findings.pairs``.
        texts: its own.
        place: in the sample, from 1.
        number: of pairs in the sample.
    """
    facts = [f"random pair {place} of {number}", row.id]
    facts += [] if pd.isna(row.category) else [row.category]
    return _article(row, texts, True, as_text(" · ".join(facts)))


def _article(row: Any, texts: Texts, sample: bool, header: str) -> str:
    # As JSON in ASCII every id comes through, control characters included.
    named = json.dumps({"id": row.id, "observed": row.observed, "sample": sample})
    return "\n".join(
        [
            f'<article data-pair="{escape(named)}">',
            f"<header>{header}</header>",
            f"<h3>prompt</h3>{_folded(texts.prompt)}",
            '<div class="sides">',
            f"<section><h3>chosen in training</h3>{_folded(texts.chosen)}</section>",
            f"<section><h3>rejected in training</h3>{_folded(texts.rejected)}</section>",
            "</div>",
            "</article>",
        ]
    )


def _folded(text: str) -> str:
    if len(text) <= FOLD:
        return f'<div class="text" dir="auto">{as_text(text)}</div>'
    start = f'<span class="text" dir="auto">{as_text(text[: FOLD // 2])} …</span>'
    return (
        f"<details><summary>{start}{len(text):,} characters</summary>"
        f'<div class="text" dir="auto">{as_text(text)}</div></details>'
    )
