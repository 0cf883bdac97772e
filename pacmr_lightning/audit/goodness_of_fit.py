"""Tests whether one flip rate for all pairs explains how often labels disagree with the policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit
from scipy.stats import beta

from .flip_curve import HIGHEST, STEEPEST

LEVEL = 0.05
"""A fit is refused at p-values under it."""
_PARTS = 10
"""Most parts that pairs are put into by abs(u)."""
_LEAST = 5.0
"""Variance of the number of labels against the policy in a part."""


@dataclass(frozen=True)
class GoodnessOfFit:
    """A test of the curve over parts of the pairs by abs(u)."""

    p: float
    """Of a gap between curve and labels as large as this, where the curve holds; NaN where it cannot be
    tested."""
    freedom: int
    """Parts that are left free by the fit."""

    @property
    def refused(self) -> bool:
        """Whether the labels contradict the curve."""
        return self.p < LEVEL


def goodness_of_fit(
    size: np.ndarray,
    against: np.ndarray,
    prompts: np.ndarray,
    rate: float,
    slope: float,
    known: bool,
) -> GoodnessOfFit:
    """Compares a fitted curve with the labels by parts of abs(u).

    A score test. Residuals of the parts, in units of their binomial error, are looked at in those directions
    that the fit of eps and k has not already made zero. Their covariance is that of sums over prompts, so
    pairs of a prompt may depend on each other.

    Args:
        size: (N,) abs(u).
        against: (N,) 1 where the label is against the policy, 0 where not, a half where it is undecided.
        prompts: (N,) numbers of the prompts.
        rate: the fitted or given eps.
        slope: the fitted k.
        known: whether eps was given.
    """
    unsure = expit(-slope * size)
    p = rate + (1 - 2 * rate) * unsure
    variance = np.maximum(p * (1 - p), 1e-9)
    residual = against - p
    free = []  # derivatives of p by what was fitted; at a bound nothing was
    if not known and 0 < rate < HIGHEST:
        free.append(1 - 2 * unsure)
    if 0 < slope * size.mean() < STEEPEST:
        free.append(-(1 - 2 * rate) * size * unsure * (1 - unsure))
    # Parts of equal variance: of the pairs that the policy is surest of few are against it, which is enough
    # for a normal approximation in large parts only.
    order = np.argsort(size, kind="stable")
    grown = np.cumsum(variance[order])
    parts = min(_PARTS, int(grown[-1] / _LEAST))
    part = np.empty(len(size), dtype=int)
    part[order] = np.minimum(grown / grown[-1] * parts, parts - 1)
    if parts <= len(free):
        return GoodnessOfFit(np.nan, 0)
    scale = np.sqrt(np.bincount(part, variance, parts))
    clusters, count = np.unique(prompts, return_inverse=True)[1], len(np.unique(prompts))
    sums = _sums(clusters, part, residual, count, parts) / scale
    if free:
        slopes = np.stack(free, axis=1)
        information = slopes.T @ (slopes / variance[:, None])
        by_part = np.stack([np.bincount(part, column, parts) for column in free], axis=1) / scale[:, None]
        moved = np.linalg.solve(information, by_part.T).T
        scores = np.stack(
            [np.bincount(clusters, column * residual / variance, count) for column in free], axis=1
        )
        sums = sums - scores @ moved.T
        # Under independence this is the covariance of the residuals, 1 in all directions but the fitted ones.
        covariance = np.eye(parts) - by_part @ moved.T
        sums = sums @ np.linalg.eigh(covariance)[1][:, len(free) :]
    freedom = sums.shape[1]
    if count <= freedom + 1:
        return GoodnessOfFit(np.nan, freedom)
    total = sums.sum(0)
    # t(A) V^-1 A of a sum A of G independent vectors, with V their second moments, is Hotelling's T squared
    # in another dress: divided by G it is Beta(d / 2, (G - d) / 2).
    statistic = float(total @ np.linalg.pinv(sums.T @ sums) @ total) / count
    return GoodnessOfFit(float(beta.sf(min(statistic, 1.0), freedom / 2, (count - freedom) / 2)), freedom)


def _sums(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.bincount(rows * width + columns, values, height * width).reshape(height, width)
