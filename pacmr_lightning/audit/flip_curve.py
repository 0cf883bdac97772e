"""Curve of labels that disagree with the policy by abs(u), under random flips: fit and test.

    P(against | |u| = m) = eps + (1 - 2 eps) sigmoid(-k m)

A k above ``TYPICAL`` has a weak prior, normal in log k, since the maximum-likelihood k can be infinite.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import beta

LOWEST, HIGHEST = 1e-6, 0.499
"""Bounds of the noise rate eps: its logarithm is finite, and at one half labels carry no information."""
STEEPEST = 100.0
"""Bound of k, per mean of abs(u)."""
TYPICAL = 1.5
"""Typical k of a policy, per mean of abs(u)."""
SPREAD = 1.0
"""Standard deviation of the prior of log k."""
LEVEL = 0.05
_PARTS = 10
_LEAST = 5.0


def against_policy(u: np.ndarray) -> np.ndarray:
    """Return 1 for a label that disagrees with the policy, 0 for one that agrees, a half for u = 0."""
    return ((u < 0) + (u <= 0).astype(float)) / 2


def share_against(rate: np.ndarray | float, slope: float, size: np.ndarray) -> np.ndarray:
    """Return the expected fraction of labels that disagree with the policy at abs(u) = size."""
    return rate + (1 - 2 * rate) * expit(-slope * size)


def quantiles(size: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return (N,) bins of abs(u), at most ``bins``, their (B,) means over the overall mean, and that mean."""
    unit = float(size.mean()) or 1.0
    edges = np.unique(np.quantile(size, np.linspace(0, 1, bins + 1)[1:-1]))
    places, count = np.searchsorted(edges, size, side="right"), len(edges) + 1
    means = np.bincount(places, size, count) / np.maximum(np.bincount(places, minlength=count), 1)
    return places, means / unit, unit


class Counts:
    """Counts of disagreeing and agreeing labels, by (N,) numbered groups and ``quantiles`` of abs(u)."""

    def __init__(self, u: np.ndarray, bins: int, groups: np.ndarray):
        self.against = against_policy(u)
        places, self.size, self.unit = quantiles(np.abs(u), bins)
        self.cells = groups * len(self.size) + places
        self.shape = (int(groups.max()) + 1, len(self.size))

    def of(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return two (G, B) counts, disagreeing and agreeing, of pairs with (N,) weights."""
        length = self.shape[0] * self.shape[1]
        against, agreeing = (
            np.bincount(self.cells, weights * side, length).reshape(self.shape)
            for side in (self.against, 1 - self.against)
        )
        return against, agreeing


def resampled_prompts(prompts: np.ndarray, resamples: int) -> Iterator[np.ndarray]:
    """Yield (N,) pair weights of a bootstrap over prompts numbered from 0, the same in each call."""
    rng = np.random.default_rng(0)
    number = int(prompts.max()) + 1
    shares = np.full(number, 1 / number)
    for _ in range(resamples):
        yield rng.multinomial(number, shares)[prompts]


def fit_curve(
    size: np.ndarray,
    against: np.ndarray,
    agreeing: np.ndarray,
    start: tuple[float, float],
    *,
    rates: tuple[float, float] = (LOWEST, HIGHEST),
    slopes: tuple[float, float] = (0.0, STEEPEST),
) -> tuple[np.ndarray, float]:
    """Return the most probable eps of each of G groups, and their common k.

    ``size`` is (B,) abs(u) of bins in units of its mean, ``against`` and ``agreeing`` (G, B) counts, which
    may be weighted. Equal bounds ``rates`` or ``slopes`` fix eps or k; the search begins at ``start`` (eps
    and k).
    """
    groups = len(against)

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        rate, slope = parameters[:-1, None], parameters[-1]
        unsure = expit(-slope * size)
        p = np.clip(rate + (1 - 2 * rate) * unsure, 1e-12, 1 - 1e-12)
        by_p = agreeing / (1 - p) - against / p
        by_slope = -(1 - 2 * rate) * size * unsure * (1 - unsure)
        gradient = np.append((by_p * (1 - 2 * unsure)).sum(1), (by_p * by_slope).sum())
        prior, by_slope = prior_of_slope(slope)
        gradient[-1] += by_slope
        return -(against * np.log(p) + agreeing * np.log1p(-p)).sum() + prior, gradient

    first = np.append(np.full(groups, np.clip(start[0], *rates)), np.clip(start[1], *slopes))
    best = minimize(loss, first, jac=True, method="L-BFGS-B", bounds=[rates] * groups + [slopes]).x
    return best[:-1], float(best[-1])


def prior_of_slope(slope: float) -> tuple[float, float]:
    """Return minus the log-prior of k (per mean of abs(u)), and its derivative."""
    off = np.log(max(slope, TYPICAL) / TYPICAL) / SPREAD
    return off**2 / 2, off / (SPREAD * max(slope, TYPICAL))


@dataclass(frozen=True)
class GoodnessOfFit:
    """Test of the curve over parts of the pairs by abs(u)."""

    p: float
    """p-value; NaN if it cannot be tested."""
    freedom: int

    @property
    def refused(self) -> bool:
        """True if the labels contradict the curve."""
        return self.p < LEVEL


def goodness_of_fit(
    size: np.ndarray,
    against: np.ndarray,
    prompts: np.ndarray,
    rate: float,
    slope: float,
    known: bool,
) -> GoodnessOfFit:
    """Score test of a fitted curve (eps ``rate``, perhaps ``known``, and k ``slope``) over parts by abs(u).

    Standardised residuals, in the directions that the fit leaves free, are compared with sums over prompts.
    ``size``, ``against`` (see ``sides``) and ``prompts`` (numbers) are (N,).
    """
    unsure = expit(-slope * size)
    p = rate + (1 - 2 * rate) * unsure
    variance = np.maximum(p * (1 - p), 1e-9)
    residual = against - p
    free = []  # derivatives of p by fitted parameters; one at its bound is not fitted
    if not known and LOWEST < rate < HIGHEST:
        free.append(1 - 2 * unsure)
    if 0 < slope * size.mean() < STEEPEST:
        free.append(-(1 - 2 * rate) * size * unsure * (1 - unsure))
    # Parts of equal variance: at large abs(u) only large parts are approximately normal.
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
        # Covariance of the residuals under independence: 1 in all directions but the fitted ones.
        covariance = np.eye(parts) - by_part @ moved.T
        sums = sums @ np.linalg.eigh(covariance)[1][:, len(free) :]
    freedom = sums.shape[1]
    if count <= freedom + 1:
        return GoodnessOfFit(np.nan, freedom)
    total = sums.sum(0)
    # t(A) V^-1 A of a sum A of G independent vectors with second moments V, divided by G, is Beta(d / 2, (G -
    # d) / 2) (Hotelling's T squared).
    statistic = float(total @ np.linalg.pinv(sums.T @ sums) @ total) / count
    return GoodnessOfFit(float(beta.sf(min(statistic, 1.0), freedom / 2, (count - freedom) / 2)), freedom)


def _sums(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.bincount(rows * width + columns, values, height * width).reshape(height, width)
