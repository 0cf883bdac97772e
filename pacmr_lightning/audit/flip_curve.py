"""The expected share of labels that disagree with the policy, by how sure it is, under random flips.

    P(against | |u| = m) = eps + (1 - 2 eps) sigmoid(-k m)

A half where the policy is undecided, eps where it is sure. Groups of pairs may have an eps each and one k.

Where labels hardly tell eps and k apart, the best k can be infinite: every pair would be sure. So a k above
``TYPICAL`` has a weak prior, normal in log k, which a thousand pairs of a policy that has learned something
outweigh.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

HIGHEST = 0.499
"""Flips at a rate of one half leave nothing that could be learned."""
STEEPEST = 100.0
"""Bound of k, per mean of abs(u)."""
TYPICAL = 1.5
"""k of most policies, per mean of abs(u): at their mean sureness they are right 82% of the time."""
SPREAD = 1.0
"""Standard deviation of log k above it."""


def sides(u: np.ndarray) -> np.ndarray:
    """1 where a label is against the policy, 0 where not; a policy that is undecided is half against it."""
    return ((u < 0) + (u <= 0).astype(float)) / 2


def share_against(rate: np.ndarray | float, slope: float, size: np.ndarray) -> np.ndarray:
    """The curve: the expected share of labels against the policy at abs(u) = size."""
    return rate + (1 - 2 * rate) * expit(-slope * size)


def size_bins(size: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """(N,) numbers of bins by quantiles, and how many there are: a fit looks at counts, not at pairs."""
    edges = np.unique(np.quantile(size, np.linspace(0, 1, most + 1)[1:-1]))
    return np.searchsorted(edges, size, side="right"), len(edges) + 1


def fit_curve(
    size: np.ndarray,
    against: np.ndarray,
    agreeing: np.ndarray,
    *,
    rates: tuple[float, float] = (0.0, HIGHEST),
    slopes: tuple[float, float] = (0.0, STEEPEST),
    starts: Sequence[tuple[float, float]] = ((0.02, 1.0), (0.25, 1.0)),
) -> tuple[np.ndarray, float, float]:
    """Most probable eps of each of G groups, and the k of all of them.

    Args:
        size: (B,) abs(u) of each bin, in units of its mean over pairs.
        against: (G, B) labels against the policy; counts may be weighted.
        agreeing: (G, B) the others.
        rates: bounds of each eps; equal ones fix it.
        slopes: bounds of k.
        starts: pairs of an eps and a k, from which the search begins.

    Returns:
        eps (G,), k, and minus the log-likelihood.
    """
    groups = len(against)

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        rate, slope = parameters[:-1, None], parameters[-1]
        unsure = expit(-slope * size)
        p = np.clip(rate + (1 - 2 * rate) * unsure, 1e-12, 1 - 1e-12)
        by_p = agreeing / (1 - p) - against / p
        by_slope = -(1 - 2 * rate) * size * unsure * (1 - unsure)
        gradient = np.append((by_p * (1 - 2 * unsure)).sum(1), (by_p * by_slope).sum())
        off = _spreads_above_typical(slope)
        gradient[-1] += off / (SPREAD * max(slope, TYPICAL))
        return -(against * np.log(p) + agreeing * np.log1p(-p)).sum() + off**2 / 2, gradient

    bounds = [rates] * groups + [slopes]
    fits = [
        minimize(
            loss,
            np.append(np.full(groups, np.clip(rate, *rates)), np.clip(slope, *slopes)),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
        )
        for rate, slope in starts
    ]
    best = min(fits, key=lambda fit: fit.fun)
    return best.x[:-1], float(best.x[-1]), float(best.fun - _spreads_above_typical(best.x[-1]) ** 2 / 2)


def _spreads_above_typical(slope: float) -> float:
    return np.log(max(slope, TYPICAL) / TYPICAL) / SPREAD
