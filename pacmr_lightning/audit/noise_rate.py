"""The noise rate: the share of wrong labels, and P(wrong) of each, from implicit reward differences u.

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

``decide`` says which rate an audit goes on with: given, of a sample that was read, estimated, or assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from scipy.special import expit, logit
from scipy.stats import binomtest
from sklearn.mixture import GaussianMixture

from ..analysis.standard_error import clustered_standard_error
from .flip_curve import (
    HIGHEST,
    Counts,
    GoodnessOfFit,
    fit_curve,
    goodness_of_fit,
    resampled_prompts,
    share_against,
    sides,
)
from .scorers import BASIS, Scorer

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
class NoiseRate:
    """What u says of the labels of N pairs."""

    rate: float
    """Expected share of wrong labels, in [0, 0.5)."""
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
    draws: np.ndarray
    """(R, 2) eps and k of the resamples."""
    known: bool = False
    """Whether the rate was given, and not estimated."""
    assumed: bool = False
    """Whether a known rate was given for the case alone that none can be estimated."""

    @property
    def stderr(self) -> float:
        """Its standard error, by resampling prompts."""
        return 0.0 if self.known else float(np.std(self.draws[:, 0], ddof=1))

    @property
    def low(self) -> float:
        """The lower end of the 95% interval, by resampling prompts."""
        return float(np.quantile(self.draws[:, 0], 0.025))

    @property
    def high(self) -> float:
        """The upper end."""
        return float(np.quantile(self.draws[:, 0], 0.975))

    @property
    def identified(self) -> bool:
        """True if the rate was given or can be told from the labels."""
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
        """(N,) probability that each label is wrong; NaN where the rate is not identified."""
        if not self.identified:
            return np.full(len(u), np.nan)
        rates = np.clip(self.draws[:, 0], 1e-6, None)
        found = [expit(logit(rate) - k * u) for rate, k in zip(rates, self.draws[:, 1], strict=True)]
        return np.mean(found, axis=0)


def estimate_noise_rate(
    u: np.ndarray,
    prompts: np.ndarray,
    known: float | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> NoiseRate:
    """Fit the noise rate, or only how sure the policy is where that rate is ``known``.

    Args:
        u: (N,) implicit reward differences in the order of the labels, finite.
        prompts: (N,) numbers of the pairs' prompts from 0 on; pairs of one prompt are resampled together.
        known: the noise rate, in [0, 0.5); None to estimate it.
        resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    size, against = np.abs(u), sides(u)
    counts = Counts(u, _BINS)
    whole = counts.of(np.ones(len(u)))
    among = (0.0, HIGHEST) if known is None else (known, known)
    (rate,), slope, loss = fit_curve(counts.size, *whole, rates=among)
    _, _, clean_loss = fit_curve(counts.size, *whole, rates=(0.0, 0.0))
    penalty = np.log(len(u))
    # Pairs of a prompt repeat each other, so their likelihoods count as those of fewer pairs.
    effect = design_effect(against, prompts)
    start = [(max(rate, 0.02), slope)]  # a resample's fit is near that of the pairs
    draws = []
    for weights in resampled_prompts(prompts, resamples, seed):
        (again,), steepness, _ = fit_curve(counts.size, *counts.of(weights), rates=among, starts=start)
        draws.append((again, steepness / counts.unit))
    separates = bool(2 * (len(u) * np.log(2) - min(loss, clean_loss)) / effect > penalty)
    slope /= counts.unit
    fit = GoodnessOfFit(np.nan, 0)
    if separates:
        fit = goodness_of_fit(size, against, prompts, rate, slope, known is not None)
    return NoiseRate(
        rate=float(rate),
        slope=float(slope),
        separates=separates,
        gain=float(2 * (clean_loss - loss) / effect - penalty),
        tenths=_tenths(size, against, prompts, rate, slope),
        fit=fit,
        mixture=_mixture(u),
        draws=np.array(draws),
        known=known is not None,
    )


def rate_by(pairs: pd.DataFrame, scorer: Scorer, known: float | None = None) -> NoiseRate:
    """The noise rate by one of the scores of N pairs; see ``estimate_noise_rate``."""
    return estimate_noise_rate(pairs[BASIS[scorer]].to_numpy(), pairs["prompt"].to_numpy(), known)


@dataclass(frozen=True)
class SampleEstimate:
    """The noise rate by a random sample that a person has read."""

    wrong: int
    right: int
    dropped: int
    unsure: int

    @property
    def read(self) -> int:
        """Labels that are found wrong or right."""
        return self.wrong + self.right

    @property
    def rate(self) -> float:
        """Share of the wrong ones among them; NaN without any."""
        return self.wrong / self.read if self.read else float("nan")

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95% interval by Clopper and Pearson, which holds the truth at least that often; else NaN."""
        if not self.read:
            return float("nan"), float("nan")
        found = binomtest(self.wrong, self.read).proportion_ci(0.95, method="exact")
        return float(found.low), float(found.high)

    @property
    def told(self) -> float | None:
        """The rate that an audit is told, or the interval's upper end where no label was wrong.

        None where the sample leaves half of the labels or more.
        """
        share = self.rate if self.wrong else self.interval[1]
        return share if 0 < share < 0.5 else None

    def contradicts(self, own: NoiseRate) -> bool:
        """Return whether the interval has nothing in common with that of an audit's own estimate."""
        low, high = self.interval
        return own.identified and not own.known and (low > own.high or high < own.low)

    def sentences(self, own: NoiseRate, used: float | None) -> list[str]:
        """What the sample says, beside the audit's ``own`` estimate and the rate that is ``used``, if any."""
        if not self.read:
            return []
        out = ""
        if self.dropped or self.unsure:
            out = f"; {self.dropped} dropped and {self.unsure} unsure are left out"
        low, high = self.interval
        told = [
            f"Of {self.read:,} labels that were drawn at random and decided by hand, {self.wrong:,} are "
            f"wrong: {self.rate:.1%} (95% interval {low:.1%} to {high:.1%}){out}."
        ]
        if self.contradicts(own):
            told.append(
                f"That disagrees with the audit's own estimate, {own.rate:.1%} (95% interval {own.low:.1%} "
                f"to {own.high:.1%}): its flips may not be independent of the pair, its policy may know the "
                "labels by heart, or the reader judges otherwise than those who gave them."
            )
        if used is None:
            told.append("These are too few to tell the audit a share.")
        elif used == self.told:
            why = "" if self.wrong else ", the most that the sample leaves, since it has no wrong label"
            told.append(f"The audit takes {used:.1%}{why}.")
        return told

    def table(self, own: NoiseRate) -> pd.DataFrame:
        """One row: what was decided, the share with its interval, and the audit's own estimate."""
        counts = {name: getattr(self, name) for name in ("wrong", "right", "dropped", "unsure")}
        ends = (self.rate, *self.interval)
        found = (own.rate, own.low, own.high) if own.identified else (float("nan"),) * 3
        names = ("share", "low", "high", "own", "own_low", "own_high")
        row = counts | dict(zip(names, (*ends, *found), strict=True))
        return pd.DataFrame([row | {"contradicts": self.contradicts(own)}])


@dataclass(frozen=True)
class DecidedRate:
    """The noise rate that an audit goes on with."""

    rate: NoiseRate
    notes: list[str]
    """Sentences that a reader has to know of it."""
    sample: pd.DataFrame | None
    """``SampleEstimate.table`` where a sample was read."""


def decide(
    pairs: pd.DataFrame,
    scorer: Scorer,
    share: float | None,
    fallback_share: float | None,
    by_heart: bool,
    read: SampleEstimate | None = None,
) -> DecidedRate:
    """Decide the noise rate: ``share``, else that of a sample that was read, else the estimate.

    ``fallback_share`` is assumed where the estimate fails, or where it is too low since the scorer has
    learned the labels ``by_heart``. Where labels have moved u so far that nothing else is left of it,
    ``unpulled_u`` of the pairs becomes u.
    """
    notes: list[str] = []
    sample: pd.DataFrame | None = None
    if read is not None and read.read:
        own = rate_by(pairs, scorer)
        share = read.told if share is None else share
        notes += read.sentences(own, share)
        sample = read.table(own)
        found = own if share is None else rate_by(pairs, scorer, share)
    else:
        found = rate_by(pairs, scorer, share)
    needed = share is None and (by_heart or not found.identified)
    told = share is not None or (needed and fallback_share is not None)
    if told and not found.separates and not pairs["unpulled_u"].equals(pairs["u"]):
        pairs["unpulled_u"] = pairs["u"]  # what the labels have added is all there is
        found = rate_by(pairs, scorer, share)
    # Scores that are no better than coin flips tell labels apart at no rate.
    if needed and found.separates and fallback_share is not None:
        assumed = fallback_share if by_heart else min(fallback_share, found.at_most)
        found = replace(rate_by(pairs, scorer, assumed), assumed=True)
        why = f", the most that the surest tenth of the pairs leaves ({fallback_share:g} was to be taken)"
        notes.append(
            f"The share of wrong labels cannot be told from these scores; it is taken for {assumed:.3g}"
            f"{why if assumed < fallback_share else ''}."
        )
    return DecidedRate(found, notes, sample)


def design_effect(values: np.ndarray, clusters: np.ndarray) -> float:
    """How many times the variance of a mean is that of N independent values of 0 and 1; at least 1.

    Values of a cluster may depend on each other; with one cluster it is N, since all may say the same.
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
