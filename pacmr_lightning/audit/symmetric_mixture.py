"""PerpCorrect's model of right and wrong labels: two normal distributions that mirror each other at 0."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import curve_fit
from scipy.special import expit, logit
from scipy.stats import norm

from ..errors import UserError

BINS = 100
"""Of the histogram that the curve is fitted to."""
WORST_DISTANCE = 0.1
"""Between the fitted distribution and that of the values, at most, for a fit to count."""
_STARTS = (-0.25, -0.5, -0.75, -0.95)
"""Of mu, in units of the values' root mean square, which mu^2 + sigma^2 is the square of."""


@dataclass(frozen=True)
class SymmetricMixture:
    """alpha N(mu, sigma^2) + (1 - alpha) N(-mu, sigma^2), of pairs whose label is right and wrong."""

    mu: float
    """Mean of pairs whose label is right; below 0."""
    sigma: float
    alpha: float
    """Share of right labels."""
    distance: float
    """Largest difference between its distribution function and that of the values it was fitted to."""

    @property
    def threshold(self) -> float:
        """t in [mu, -mu], below which labels are kept: where both kinds are alike often, if inside.

        It maximises ``accuracy``: alpha phi((t - mu) / sigma) = (1 - alpha) phi((t + mu) / sigma).
        """
        with np.errstate(divide="ignore", over="ignore"):
            crossing = self.sigma**2 * logit(self.alpha) / (-2 * self.mu)
        return float(np.clip(crossing, self.mu, -self.mu))

    def accuracy(self, threshold: float) -> float:
        """Share of labels that are right once all pairs from a threshold on have the other."""
        right = norm.cdf(threshold, self.mu, self.sigma)
        return float(self.alpha * right + (1 - self.alpha) * norm.sf(threshold, -self.mu, self.sigma))

    @property
    def separation(self) -> float:
        """The best such share for a threshold in [mu, -mu]."""
        return self.accuracy(self.threshold)

    def wrong(self, values: np.ndarray) -> np.ndarray:
        """(N,) posterior probability that the label of a pair with such a value is wrong."""
        return expit(-2 * self.mu / self.sigma**2 * values - logit(self.alpha))

    @property
    def problem(self) -> str | None:
        """Why labels should not be corrected by this fit; None where nothing speaks against it."""
        if self.distance > WORST_DISTANCE:
            return f"misses the distribution by {self.distance:.2f}"
        if self.alpha < 0.5:
            return f"takes {1 - self.alpha:.0%} of the labels for wrong"
        return None


def fit_mixture(values: np.ndarray) -> SymmetricMixture:
    """Fits the mixture's density to a histogram of N values by least squares, as PerpCorrect does.

    The curve is that at the middle of each bin; the method's own code takes it at the left edge, which
    moves the fit by half a bin. Several starting points, which have the values' mean and mean square, take
    the place of its single one, which suits values of a few nats only.

    Raises:
        UserError: the values do not differ, one is not finite, or the fit does not converge.
    """
    if not np.isfinite(values).all() or np.ptp(values) == 0:
        raise UserError(
            f"The {len(values)} perplexity differences are all {values[0]:g}, or one is not finite, so they "
            "say nothing of labels; train the rounds with another --rounds.learning_rate."
        )
    scale = float(np.sqrt(np.mean(values**2)))
    scaled = np.sort(values / scale)
    heights, edges = np.histogram(scaled, bins=BINS, density=True)
    middles = (edges[1:] + edges[:-1]) / 2
    found = []
    for mu in _STARTS:
        alpha = min(max((1 + float(scaled.mean()) / mu) / 2, 0.05), 0.95)
        try:
            best, _, info, *_ = curve_fit(
                _density,
                middles,
                heights,
                p0=[mu, np.sqrt(1 - mu**2), alpha],
                bounds=([-np.inf, 1e-3, 0], [-1e-6, np.inf, 1]),
                full_output=True,
            )
        except RuntimeError:
            continue
        found.append((float(np.square(info["fvec"]).sum()), *map(float, best)))
    if not found:
        raise UserError(
            f"No mixture of two normal distributions fits the {len(values)} perplexity differences; train "
            "the rounds with another --rounds.learning_rate."
        )
    _, mu, sigma, alpha = min(found)
    # The distribution function of the values jumps, and is compared on either side.
    fitted = alpha * norm.cdf(scaled, mu, sigma) + (1 - alpha) * norm.cdf(scaled, -mu, sigma)
    steps = np.arange(len(scaled) + 1) / len(scaled)
    distance = max(np.abs(fitted - steps[1:]).max(), np.abs(fitted - steps[:-1]).max())
    return SymmetricMixture(mu * scale, sigma * scale, alpha, float(distance))


def _density(x: np.ndarray, mu: float, sigma: float, alpha: float) -> np.ndarray:
    return alpha * norm.pdf(x, mu, sigma) + (1 - alpha) * norm.pdf(x, -mu, sigma)


def selection(values: np.ndarray, alpha: float, size: int) -> tuple[list[int], list[int]]:
    """The pairs to learn from next: a share alpha of ``size`` with the lowest values, the rest the highest.

    Returns:
        Indices of those whose label is kept, and of those whose label is exchanged, the surest first.
    """
    order = np.argsort(values, kind="stable").tolist()
    keep = round(size * alpha)
    return order[:keep], order[::-1][: size - keep]
