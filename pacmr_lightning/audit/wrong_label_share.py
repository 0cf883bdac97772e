"""The share of wrong labels, and each label's probability of being wrong, from u alone.

u changes sign when a pair's responses change places. A policy that has not seen a label cannot know whether
it was flipped, so under flips at a rate eps the wrong labels' u mirrors that of the right ones. Of the pairs
with abs(u) = m the share whose label is against the policy is

    eps + (1 - 2 eps) sigmoid(-k m),

where sigmoid(k m) is how often the policy takes the right side at m: a half where it is undecided, eps where
it is sure. The course between the two gives both eps and k, whatever the distribution of m; then
P(wrong | u) = sigmoid(logit(eps) - k u). It rests on flips that are
independent of the pair, and on log-odds of being right that grow in proportion to abs(u). A policy that is
sure of wrong judgements makes eps too large, one that has learned the labels by heart too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import expit, logit
from sklearn.mixture import GaussianMixture

from ..analysis.consistency import clustered_standard_error

RESAMPLES = 200
"""Of the bootstrap over prompts."""
_BINS = 256
"""Of abs(u), by quantiles: a fit looks at counts, not at pairs."""
_HIGHEST = 0.499
"""Flips at a rate of one half leave nothing that could be learned."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of Gaussians fitted to u, which needs no symmetry: a second opinion."""

    gain: float
    """BIC of one component minus BIC of two; above 0 where two are better."""
    lower: float
    """Share of the component with the lower mean."""


@dataclass(frozen=True)
class Share:
    """What u says of the labels of N pairs."""

    rate: float
    """Expected share of wrong labels, in [0, 0.5)."""
    stderr: float
    """Its standard error, by resampling prompts."""
    low: float
    """The 2.5th percentile of the resamples."""
    high: float
    """The 97.5th percentile."""
    slope: float
    """k, per nat of u."""
    separates: bool
    """Whether u says anything of the labels: BIC against labels that are coin flips."""
    gain: float
    """BIC without wrong labels minus BIC with them; above 0 where u shows that there are some."""
    tenths: pd.DataFrame
    """By tenths of abs(u): ``size`` (its mean, in nats), ``against`` (share of the labels against the policy)
    with ``stderr``, and ``fitted``."""
    mixture: Mixture
    known: bool = False
    """Whether the rate was given, and not estimated."""

    @property
    def identified(self) -> bool:
        """Whether the share is more than an invention."""
        return self.separates and (self.known or self.gain > 0)

    def wrong(self, u: np.ndarray) -> np.ndarray:
        """(N,) probability that each label is wrong; NaN where the share is not identified."""
        if not self.identified:
            return np.full(len(u), np.nan)
        return expit(logit(self.rate) - self.slope * u)


def expected_share(
    u: np.ndarray,
    prompts: np.ndarray,
    known: float | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Share:
    """Fits the share of wrong labels, or only how sure the policy is where that share is known.

    Args:
        u: (N,) implicit reward differences in the order of the labels, finite.
        prompts: (N,) numbers of the pairs' prompts, 0 to P - 1; pairs of one prompt are resampled together.
        known: the share of wrong labels, in [0, 0.5); None to estimate it.
        resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    size = np.abs(u)
    scale = size.mean() or 1.0
    edges = np.unique(np.quantile(size, np.linspace(0, 1, _BINS + 1)[1:-1]))
    bins = np.searchsorted(edges, size, side="right")
    # A policy that is undecided is half against the label.
    against = ((u < 0) + (u <= 0).astype(float)) / 2
    count = len(edges) + 1
    middle = np.bincount(bins, size, count) / np.maximum(np.bincount(bins, minlength=count), 1) / scale

    def counts(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (
            np.bincount(bins, weights * against, count),
            np.bincount(bins, weights * (1 - against), count),
        )

    ones = np.ones(len(u))
    among = (0.0, _HIGHEST) if known is None else (known, known)
    rate, slope, loss = _fit(middle, *counts(ones), among=among)
    _, _, clean_loss = _fit(middle, *counts(ones), among=(0.0, 0.0))
    penalty = np.log(len(u))
    rng = np.random.default_rng(seed)
    start = [(max(rate, 0.02), slope)]  # a resample's fit is near that of the pairs
    number = int(prompts.max()) + 1
    shares = np.full(number, 1 / number)
    found = [
        _fit(middle, *counts(rng.multinomial(number, shares)[prompts]), among=among, starts=start)[0]
        for _ in range(resamples if known is None else 0)
    ] or [rate, rate]
    return Share(
        rate=rate,
        stderr=float(np.std(found, ddof=1)),
        low=float(np.quantile(found, 0.025)),
        high=float(np.quantile(found, 0.975)),
        slope=float(slope / scale),
        separates=bool(2 * len(u) * np.log(2) - 2 * min(loss, clean_loss) > penalty),
        gain=float(2 * (clean_loss - loss) - penalty),
        tenths=_tenths(size, against, prompts, rate, slope / scale),
        mixture=_mixture(u),
        known=known is not None,
    )


def _fit(
    size: np.ndarray,
    against: np.ndarray,
    agreeing: np.ndarray,
    *,
    among: tuple[float, float],
    starts: Sequence[tuple[float, float]] = ((0.02, 1.0), (0.25, 1.0)),
) -> tuple[float, float, float]:
    """The rate, the slope and minus the log-likelihood of counts by size, which may be weighted."""

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        rate, slope = parameters
        unsure = expit(-slope * size)
        p = np.clip(rate + (1 - 2 * rate) * unsure, 1e-12, 1 - 1e-12)
        by_p = agreeing / (1 - p) - against / p
        by_slope = -(1 - 2 * rate) * size * unsure * (1 - unsure)
        gradient = np.array([(by_p * (1 - 2 * unsure)).sum(), (by_p * by_slope).sum()])
        return -(against * np.log(p) + agreeing * np.log1p(-p)).sum(), gradient

    bounds = [among, (0.0, 100.0)]
    fits = [
        minimize(loss, [float(np.clip(rate, *among)), slope], jac=True, method="L-BFGS-B", bounds=bounds)
        for rate, slope in starts
    ]
    best = min(fits, key=lambda fit: fit.fun)
    return float(best.x[0]), float(best.x[1]), float(best.fun)


def _tenths(
    size: np.ndarray, against: np.ndarray, prompts: np.ndarray, rate: float, slope: float
) -> pd.DataFrame:
    order = np.argsort(size, kind="stable")
    rows = []
    for part in np.array_split(order, min(10, len(order))):
        fitted = rate + (1 - 2 * rate) * expit(-slope * size[part]).mean()
        error = clustered_standard_error(against[part], prompts[part])
        rows.append((size[part].mean(), against[part].mean(), error, fitted))
    return pd.DataFrame(rows, columns=["size", "against", "stderr", "fitted"])


def _mixture(u: np.ndarray) -> Mixture:
    column = u[:, None]
    if len(np.unique(u)) < 3:
        return Mixture(-np.inf, np.nan)
    one, two = (GaussianMixture(k, n_init=3, random_state=0).fit(column) for k in (1, 2))
    return Mixture(float(one.bic(column) - two.bic(column)), float(two.weights_[np.argmin(two.means_[:, 0])]))
