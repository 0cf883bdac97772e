"""How a policy judges pairs under two wordings of their prompts (paper, appendix on their consistency)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.special import expit, logit

from ..batch import UNKNOWN
from ..errors import UserError


def measure(pairs: pd.DataFrame, taus: Sequence[float]) -> pd.DataFrame:
    """Return the quantities of the paper's appendix for one run's pairs, one row per threshold.

    The columns are ``tau``, ``pairs`` (N), ``prompts`` (distinct ones), ``l1`` (mean l1 distance of the two
    binary preference distributions), ``retained`` (count), ``coverage``, ``clean_accuracy`` (of pairs whose
    better response is known) and ``direction_agreement`` (shares; NaN of no pair), and the standard error of
    each mean as ``..._stderr``, which allows for pairs that share a prompt.

    Args:
        pairs: as ``probe.judged_pairs`` makes them; ``clean`` is -1 where nobody knows.
        taus: confidence thresholds, each at least 0.5 and below 1.

    Raises:
        UserError: there are no thresholds, or one is out of range.
    """
    check_taus(taus)
    u, augmented_u = (pairs[name].to_numpy(np.float64) for name in ("u", "augmented_u"))
    clean, prompts = pairs["clean"].to_numpy(), pairs["prompt"].to_numpy()
    l1 = 2 * np.abs(expit(u) - expit(augmented_u))
    # As the accuracy in metrics.py: an undecided policy is half right, whichever response comes first.
    first = (np.sign(u) + 1) / 2
    right = np.where(clean == 1, first, 1 - first)
    same = (((u > 0) == (augmented_u > 0)).astype(float) + ((u >= 0) == (augmented_u >= 0))) / 2
    everything = np.ones(len(pairs), dtype=bool)
    rows = []
    for tau, kept in zip(taus, passes(u, taus).T, strict=True):
        row = {"tau": tau, "pairs": len(pairs), "prompts": len(np.unique(prompts))}
        for name, values, which in (
            ("l1", l1, everything),
            ("coverage", kept.astype(float), everything),
            ("clean_accuracy", right, kept & (clean != UNKNOWN)),
            ("direction_agreement", same, kept),
        ):
            row[name] = values[which].mean() if which.any() else math.nan
            row[f"{name}_stderr"] = clustered_standard_error(values[which], prompts[which])
        rows.append(row | {"retained": kept.sum()})
    table = pd.DataFrame(rows)
    table.insert(list(table).index("coverage"), "retained", table.pop("retained"))
    return table


def passes(u: np.ndarray, taus: Sequence[float]) -> np.ndarray:
    """Return (N, T) whether each of N pairs is confident enough at each of T thresholds.

    sigma(u) >= tau or <= 1 - tau, as in ``PromptAugmentationConsistency``; the paper's definition of the
    coverage has > instead, which differs in ties only.
    """
    # logit(tau) against u itself, since sigma(u) rounds to 1 for large u.
    return np.abs(u.astype(np.float64))[:, None] >= logit(np.array(taus, dtype=np.float64))


def check_taus(taus: Sequence[float]) -> None:
    """Raises UserError unless there are thresholds, and each is at least 0.5 and below 1."""
    if not taus:
        raise UserError("taus is empty, but at least one confidence threshold is needed, such as 0.6.")
    for tau in taus:
        if not 0.5 <= tau < 1:
            raise UserError(
                f"taus has {tau}, but each must be at least 0.5 and below 1 (the paper uses 0.6)."
            )


def clustered_standard_error(values: np.ndarray, clusters: np.ndarray) -> float:
    """Standard error of a mean of values that may depend on each other within clusters: pairs of a prompt.

    sqrt(G / (G - 1) * sum over clusters of (sum of the cluster's deviations from the mean)^2) / N. Where each
    of N values of 0 or 1 is a cluster, that is the binomial sqrt(p (1 - p) / (N - 1)).

    Args:
        values: (N,) floats.
        clusters: (N,) numbers of the G clusters that they belong to, from 0 on; numbers may be missing.

    Returns:
        NaN for fewer than two clusters.
    """
    sums = np.bincount(clusters, values - values.mean()) if len(values) else np.zeros(0)
    count = len(np.unique(clusters))
    if count < 2:
        return math.nan
    return math.sqrt(count / (count - 1) * np.square(sums).sum()) / len(values)
