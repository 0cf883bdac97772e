"""Noise rate of each category and annotator."""

import numpy as np
import pandas as pd

from .flip_curve import STEEPEST, Counts, fit_curve, resampled_prompts
from .noise_rate import RESAMPLES, NoiseRate

GROUPINGS = ("category", "annotator")
"""Columns of groups."""
LEAST = 50
"""Pairs of a group for its rate to be estimated."""
_BINS = 64


def group_reliability(
    pairs: pd.DataFrame, u: np.ndarray, rate: NoiseRate, resamples: int = RESAMPLES
) -> pd.DataFrame:
    """Return suspected errors and noise rate of each group, one row per group, the highest rate first.

    Each group has its own eps, and all share one k: the group mean of P(wrong) would be shrunk towards the
    overall rate. With a given overall rate, k is the one it implies. ``u`` is the score of the estimate.

    Columns: ``grouping``, ``group`` (NA for none), ``pairs``, ``suspected``, ``suspected_share``,
    ``expected`` (noise rate) with 95% interval ``low`` to ``high`` (NaN if not estimated), ``flipped``
    (fraction of known labels that are wrong), and perhaps ``learned`` (mean of ``learned_rate``).
    """
    tables = []
    for grouping in (name for name in GROUPINGS if name in pairs):
        frame = pd.DataFrame(
            {
                "group": pairs[grouping].astype("string"),
                "suspect": pairs["suggested"].eq("swap"),
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
            suspected=("suspect", "sum"),
            suspected_share=("suspect", "mean"),
            flipped=("known", "mean"),
            **learned,
        ).reset_index()
        fitted = _fitted(numbers.ngroup().to_numpy(), u, pairs["prompt"].to_numpy(), rate, resamples)
        for place, (name, values) in enumerate(zip(("expected", "low", "high"), fitted, strict=True)):
            table.insert(4 + place, name, values)
        table.insert(0, "grouping", grouping)
        tables.append(
            table.sort_values(["expected", "suspected_share", "pairs"], ascending=False, kind="stable")
        )
    return pd.concat(tables, ignore_index=True)


def _fitted(
    groups: np.ndarray, u: np.ndarray, prompts: np.ndarray, rate: NoiseRate, resamples: int
) -> np.ndarray:
    """(3, G) eps, with the ends of its interval."""
    sizes = np.bincount(groups)
    found = np.full((3, len(sizes)), np.nan)
    large = np.flatnonzero(sizes >= LEAST)
    # The curve of a policy that has memorised its labels is not informative for groups.
    contradicted = rate.known and rate.fit.refused
    if not rate.separates or not rate.identified or contradicted or not len(large):
        return found
    # An eps for each small group would bias the common k.
    kept = np.isin(groups, large)
    counts = Counts(u[kept], _BINS, np.searchsorted(large, groups[kept]))

    def fit(weights: np.ndarray, start: tuple[float, float]) -> tuple[np.ndarray, float]:
        against, agreeing = counts.of(weights)
        slopes = (0.0, STEEPEST)
        if rate.known:
            whole = against.sum(0, keepdims=True), agreeing.sum(0, keepdims=True)
            slopes = (fit_curve(counts.size, *whole, start, rates=(rate.rate, rate.rate))[1],) * 2
        return fit_curve(counts.size, against, agreeing, start, slopes=slopes)

    found[0, large], slope = fit(np.ones(kept.sum()), (rate.rate, rate.slope * counts.unit))
    drawn = [fit(weights, (rate.rate, slope))[0] for weights in resampled_prompts(prompts[kept], resamples)]
    found[1:, large] = np.quantile(drawn, (0.025, 0.975), axis=0)
    return found
