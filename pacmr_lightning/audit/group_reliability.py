"""How reliable the labels of each category or annotator are: a noise rate for every group."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .flip_curve import HIGHEST, STEEPEST, Counts, fit_curve, resampled_prompts
from .noise_rate import RESAMPLES, NoiseRate

GROUPINGS = ("category", "annotator")
"""Columns whose values are groups of pairs; those that the pairs have are used."""
LEAST = 50
"""Pairs of a group, below which its rate is not estimated."""
_BINS = 64
"""Of abs(u)."""


def group_reliability(
    pairs: pd.DataFrame, u: np.ndarray, rate: NoiseRate, resamples: int = RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """Suspects and the expected share of wrong labels of each group; the most unreliable first.

    The mean of P(wrong) over a group is drawn to the rate of all pairs, which it starts from. So each group
    gets an eps of its own, fitted together with one k, since it is one policy that judges them all. Where the
    rate of all pairs was given, k is the one that it implies.

    Args:
        pairs: N rows of ``findings.Findings``, with columns of ``GROUPINGS`` and perhaps ``learned_rate``.
        u: (N,) what the rate was estimated from.
        rate: of all pairs.
        resamples: of the bootstrap over prompts.
        seed: of the bootstrap.

    Returns:
        One row a group: ``grouping`` (the column), ``group`` (NA for pairs without one), ``pairs``,
        ``suspects`` (count), ``suspect_share``, ``expected`` (noise rate) with ``low`` and ``high`` (95%
        interval; NaN where they cannot be told), ``flipped`` (share of known labels that are wrong) and
        perhaps ``learned`` (mean of ``learned_rate``).
    """
    tables = []
    for grouping in (name for name in GROUPINGS if name in pairs):
        frame = pd.DataFrame(
            {
                "group": pairs[grouping].astype("string"),
                "suspect": pairs["suggested"].eq("flip"),
                "known": pairs["flipped"].astype("Float64"),
            }
        )
        learned = {}
        if "learned_rate" in pairs:
            frame["rate"] = pairs["learned_rate"]
            learned["learned"] = ("rate", "mean")
        numbers = frame.groupby("group", dropna=False, sort=True)
        table = numbers.agg(
            pairs=("suspect", "size"),
            suspects=("suspect", "sum"),
            suspect_share=("suspect", "mean"),
            flipped=("known", "mean"),
            **learned,
        ).reset_index()
        fitted = _fitted(numbers.ngroup().to_numpy(), u, pairs["prompt"].to_numpy(), rate, resamples, seed)
        for place, (name, values) in enumerate(zip(("expected", "low", "high"), fitted, strict=True)):
            table.insert(4 + place, name, values)
        table.insert(0, "grouping", grouping)
        tables.append(
            table.sort_values(["expected", "suspect_share", "pairs"], ascending=False, kind="stable")
        )
    return pd.concat(tables, ignore_index=True)


def _fitted(
    groups: np.ndarray, u: np.ndarray, prompts: np.ndarray, rate: NoiseRate, resamples: int, seed: int
) -> np.ndarray:
    """(3, G) eps of each group, with the ends of its interval."""
    sizes = np.bincount(groups)
    found = np.full((3, len(sizes)), np.nan)
    large = np.flatnonzero(sizes >= LEAST)
    # A policy that has learned its labels by heart is against none of them, whoever gave them.
    contradicted = rate.known and rate.fit.refused
    if not rate.separates or not rate.identified or contradicted or not len(large):
        return found
    # Small groups are left out: an eps each for a handful of pairs would draw k to where it fits noise.
    kept = np.isin(groups, large)
    counts = Counts(u[kept], _BINS, np.searchsorted(large, groups[kept]))

    def fit(weights: np.ndarray, start: tuple[float, float]) -> tuple[np.ndarray, float]:
        against, agreeing = counts.of(weights)
        slopes = (0.0, STEEPEST)
        if rate.known:
            whole = against.sum(0, keepdims=True), agreeing.sum(0, keepdims=True)
            slopes = (fit_curve(counts.size, *whole, rates=(rate.rate, rate.rate), starts=[start])[1],) * 2
        rates, slope, _ = fit_curve(
            counts.size, against, agreeing, rates=(0.0, HIGHEST), slopes=slopes, starts=[start]
        )
        return rates, slope

    found[0, large], slope = fit(np.ones(kept.sum()), (rate.rate, rate.slope * counts.unit))
    drawn = [
        fit(weights, (rate.rate, slope))[0] for weights in resampled_prompts(prompts[kept], resamples, seed)
    ]
    found[1:, large] = np.quantile(drawn, (0.025, 0.975), axis=0)
    return found
