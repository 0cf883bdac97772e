"""How a policy judges pairs under two wordings of their prompts (paper, appendix on their consistency)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.special import expit, logit

from ..errors import UserError
from .standard_error import clustered_standard_error


def measure(pairs: pd.DataFrame, taus: Sequence[float]) -> pd.DataFrame:
    """The quantities of the paper's appendix for one run's pairs. A u of 0 counts half for either response.

    Args:
        pairs: N rows with ``u`` and ``augmented_u`` (implicit reward differences under both wordings),
            ``clean`` (1 where the first response is truly better, else 0) and ``prompt`` (its number).
        taus: confidence thresholds, each at least 0.5 and below 1.

    Returns:
        One row a threshold: ``tau``, ``pairs`` (N), ``prompts`` (distinct ones), ``l1`` (mean distance of the
        two binary preference distributions), ``retained`` (count), ``coverage``, ``clean_accuracy`` and
        ``direction_agreement`` (shares; NaN where nothing is retained), and the standard error of each mean
        as ``..._stderr``, which allows for pairs that share a prompt.
    """
    u, augmented_u, clean, prompts = (
        pairs[name].to_numpy() for name in ("u", "augmented_u", "clean", "prompt")
    )
    first = np.heaviside(u, 0.5)
    right = np.where(clean == 1, first, 1 - first)
    same = ((u > 0) == (augmented_u > 0)) / 2 + ((u >= 0) == (augmented_u >= 0)) / 2
    l1 = 2 * np.abs(expit(u) - expit(augmented_u))
    rows = []
    for tau, kept in zip(taus, passes(u, taus).T, strict=True):
        row = {"tau": tau, "pairs": len(u), "prompts": len(np.unique(prompts)), **_mean("l1", l1, prompts)}
        row |= {"retained": kept.sum(), **_mean("coverage", kept.astype(float), prompts)}
        row |= _mean("clean_accuracy", right[kept], prompts[kept])
        rows.append(row | _mean("direction_agreement", same[kept], prompts[kept]))
    return pd.DataFrame(rows)


def _mean(name: str, values: np.ndarray, prompts: np.ndarray) -> dict[str, float]:
    mean = values.mean() if len(values) else np.nan
    return {name: mean, f"{name}_stderr": clustered_standard_error(values, prompts)}


def passes(u: np.ndarray, taus: Sequence[float]) -> np.ndarray:
    """(N, T) whether each of N pairs is confident enough at each of T thresholds.

    sigma(u) >= tau or <= 1 - tau, as in ``PromptAugmentationConsistency``; the paper's definition of the
    coverage has > instead, which differs in ties only.
    """
    # logit(tau) against u itself, since sigma(u) rounds to 1 for large u.
    return np.abs(u)[:, None] >= logit(np.asarray(taus))


def check_taus(taus: Sequence[float]) -> None:
    """Raises UserError unless there are thresholds, and each is at least 0.5 and below 1."""
    if not taus:
        raise UserError("taus is empty, but at least one confidence threshold is needed, such as 0.6.")
    for tau in taus:
        if not 0.5 <= tau < 1:
            raise UserError(
                f"taus has {tau}, but each must be at least 0.5 and below 1 (the paper uses 0.6)."
            )
