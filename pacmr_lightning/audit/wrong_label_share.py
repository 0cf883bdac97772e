"""The share of wrong labels, and P(wrong) of each, from a policy's implicit reward differences u.

u changes sign when a pair's responses change places. A policy that has not seen a label cannot know whether
it was flipped, so under flips at a rate eps the wrong labels' u mirrors that of the right ones. Of the pairs
with abs(u) = m the share whose label is against the policy is

    eps + (1 - 2 eps) sigmoid(-k m),

where sigmoid(k m) is how often the policy takes the right side at m: a half where it is undecided, eps where
it is sure. The course between the two gives both eps and k, whatever the distribution of m; then
P(wrong | u) = sigmoid(logit(eps) - k u), averaged over what eps and k may be: where the pairs hardly tell
them, a single best k would be sure of every label. It rests on flips that are independent of the pair, and on
log-odds of being right that grow in proportion to abs(u). A policy that is sure of wrong judgements makes eps
too large; one that has learned the labels makes it too small, unless ``own_pull`` is taken off u.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import expit, logit
from sklearn.mixture import GaussianMixture

from ..analysis.standard_error import clustered_standard_error
from .flip_curve import HIGHEST, fit_curve, share_against, sides, size_bins
from .goodness_of_fit import GoodnessOfFit, goodness_of_fit
from .holder_share import holder_share

RESAMPLES = 200
"""Of the bootstrap over prompts."""
_BINS = 256
"""Of abs(u)."""


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
    with ``stderr``, ``fitted``, and ``pairs``."""
    fit: GoodnessOfFit
    """Whether the curve is that of the labels; not tested where u says nothing of them."""
    mixture: Mixture
    holder: float
    """By ``holder_share``: a second opinion on the same u, which fits nothing."""
    draws: np.ndarray
    """(R, 2) eps and k of the resamples."""
    known: bool = False
    """Whether the rate was given, and not estimated."""
    assumed: bool = False
    """Whether a known rate was given for the case alone that none can be estimated."""

    @property
    def identified(self) -> bool:
        """Whether the share is more than an invention: somebody tells it, or the labels do."""
        return self.known or (self.separates and self.gain > 0)

    @property
    def at_most(self) -> float:
        """What the surest tenth leaves to flips that are independent of the pair: two standard errors above.

        A policy takes the wrong side now and then, which only adds to the labels against it. NaN where one
        prompt has all of these pairs.
        """
        top = self.tenths.iloc[-1]
        # No label of n against the policy leaves 3 / n (95%).
        return float(max(top["against"] + 2 * top["stderr"], 3 / top["pairs"]))

    def wrong(self, u: np.ndarray) -> np.ndarray:
        """(N,) probability that each label is wrong; NaN where the share is not identified."""
        if not self.identified:
            return np.full(len(u), np.nan)
        rates = np.clip(self.draws[:, 0], 1e-6, None)
        found = [expit(logit(rate) - k * u) for rate, k in zip(rates, self.draws[:, 1], strict=True)]
        return np.mean(found, axis=0)


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
    size, against = np.abs(u), sides(u)
    scale = size.mean() or 1.0
    bins, count = size_bins(size, _BINS)
    middle = np.bincount(bins, size, count) / np.maximum(np.bincount(bins, minlength=count), 1) / scale

    def counts(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (
            np.bincount(bins, weights * against, count)[None],
            np.bincount(bins, weights * (1 - against), count)[None],
        )

    ones = np.ones(len(u))
    among = (0.0, HIGHEST) if known is None else (known, known)
    rates, slope, loss = fit_curve(middle, *counts(ones), rates=among)
    rate = float(rates[0])
    _, _, clean_loss = fit_curve(middle, *counts(ones), rates=(0.0, 0.0))
    penalty = np.log(len(u))
    # Pairs of a prompt repeat each other, so their likelihoods count as those of fewer pairs.
    effect = design_effect(against, prompts)
    rng = np.random.default_rng(seed)
    start = [(max(rate, 0.02), slope)]  # a resample's fit is near that of the pairs
    number = int(prompts.max()) + 1
    shares = np.full(number, 1 / number)
    draws = []
    for _ in range(resamples):
        resampled = counts(rng.multinomial(number, shares)[prompts])
        (again,), steepness, _ = fit_curve(middle, *resampled, rates=among, starts=start)
        draws.append((again, steepness / scale))
    found = [again for again, _ in draws]
    separates = bool(2 * (len(u) * np.log(2) - min(loss, clean_loss)) / effect > penalty)
    slope /= scale
    fit = GoodnessOfFit(np.nan, 0)
    if separates:
        fit = goodness_of_fit(size, against, prompts, rate, slope, known is not None)
    return Share(
        rate=rate,
        stderr=0.0 if known is not None else float(np.std(found, ddof=1)),
        low=float(np.quantile(found, 0.025)),
        high=float(np.quantile(found, 0.975)),
        slope=float(slope),
        separates=separates,
        gain=float(2 * (clean_loss - loss) / effect - penalty),
        tenths=_tenths(size, against, prompts, rate, slope),
        fit=fit,
        mixture=_mixture(u),
        holder=holder_share(u),
        draws=np.array(draws),
        known=known is not None,
    )


def design_effect(values: np.ndarray, clusters: np.ndarray) -> float:
    """How many times the variance of a mean is what it were if the N values of 0 and 1 were independent.

    At least 1; with one cluster N, since all of them may say the same.

    Args:
        values: (N,) 0 and 1.
        clusters: (N,) numbers of the clusters within which they may depend on each other, from 0 on.
    """
    alone = values.mean() * (1 - values.mean()) / max(len(values) - 1, 1)
    together = clustered_standard_error(values, clusters) ** 2
    if np.isnan(together):
        return float(len(values))
    return max(1.0, float(together / alone)) if alone > 0 else 1.0


def _tenths(
    size: np.ndarray, against: np.ndarray, prompts: np.ndarray, rate: float, slope: float
) -> pd.DataFrame:
    order = np.argsort(size, kind="stable")
    rows = []
    for part in np.array_split(order, min(10, len(order))):
        fitted = share_against(rate, slope, size[part]).mean()
        error = clustered_standard_error(against[part], prompts[part])
        rows.append((size[part].mean(), against[part].mean(), error, fitted, len(part)))
    return pd.DataFrame(rows, columns=["size", "against", "stderr", "fitted", "pairs"])


def _mixture(u: np.ndarray) -> Mixture:
    column = u[:, None]
    if len(np.unique(u)) < 3:
        return Mixture(-np.inf, np.nan)
    one, two = (GaussianMixture(k, n_init=3, random_state=0).fit(column) for k in (1, 2))
    return Mixture(float(one.bic(column) - two.bic(column)), float(two.weights_[np.argmin(two.means_[:, 0])]))
