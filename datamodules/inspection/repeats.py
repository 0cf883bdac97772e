"""Pairs that repeat or contradict each other: what data says of its label noise without clean labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Repeats:
    """Kept pairs that say again, or deny, what another one says.

    A comparison is a prompt with two responses, whichever of them is the chosen one. Texts are the same where
    their tokens are.
    """

    copies: int
    """Pairs with the prompt, chosen and rejected response of an earlier one."""
    sharing: int
    """Pairs with a response that another comparison of the same prompt has too."""
    comparisons: int
    """Comparisons with more than one label."""
    labels: int
    """Their labels: pairs whose comparison comes more than once."""
    contradicting_comparisons: int
    """Comparisons of which both responses were chosen."""
    contradicting_labels: int
    """Pairs of those."""
    least_wrong: int
    """Labels outvoted by the others of their comparison: whatever the truth, so many at least are wrong."""
    noise: float | None
    """Share of wrong labels under which the labels of one comparison would disagree as often as they do, if
    each were wrong independently and alike; None where nothing is repeated, or they disagree more often than
    at random."""


def repeats(table: pd.DataFrame) -> Repeats:
    """Counts the copies and contradictions among N pairs.

    Args:
        table: columns ``prompt``, ``chosen`` and ``rejected``, N numbers each that are the same where
            the texts are; the two responses of a pair differ.
    """
    responses = table[["chosen", "rejected"]].to_numpy()
    first, second = responses.min(axis=1), responses.max(axis=1)
    pairs = pd.DataFrame({"prompt": table["prompt"], "first": first, "second": second})
    pairs["label"] = responses[:, 0] == first
    comparisons = pairs.groupby(["prompt", "first", "second"], sort=False)["label"].agg(["size", "sum"])
    comparisons = comparisons.reset_index()
    shown = comparisons.melt("prompt", ["first", "second"], ignore_index=False)
    shared = shown[shown.duplicated(["prompt", "value"], keep=False)].index.unique()
    more = comparisons[comparisons["size"] > 1]
    n, k = more["size"], more["sum"]
    outvoted = np.minimum(k, n - k)
    contradicting = outvoted > 0
    disagree = float((k * (n - k)).sum() / (n * (n - 1) / 2).sum()) if len(more) else 1.0
    return Repeats(
        copies=int(pairs.duplicated().sum()),
        sharing=int(comparisons["size"].loc[shared].sum()),
        comparisons=len(more),
        labels=int(n.sum()),
        contradicting_comparisons=int(contradicting.sum()),
        contradicting_labels=int(n[contradicting].sum()),
        least_wrong=int(outvoted.sum()),
        # Two labels that are each wrong with probability e disagree with probability 2 e (1 - e).
        noise=(1 - (1 - 2 * disagree) ** 0.5) / 2 if disagree <= 0.5 else None,
    )
