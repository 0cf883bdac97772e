"""The noise rate, and P(wrong) of each label, from implicit reward margins u.

If label errors are independent of the pair, u of wrong labels mirrors that of right ones. Of the pairs with
abs(u) = m the fraction eps + (1 - 2 eps) sigmoid(-k m) has a label that disagrees with the policy: a half
near u = 0, the noise rate eps where abs(u) is large. P(wrong | u) = sigmoid(logit(eps) - k u) is averaged
over resamples, since a single k could be overconfident. eps is too high for a policy with confident errors,
and too low for one that has memorised labels, unless ``own_pull`` is subtracted from u.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import pandas as pd
from scipy.special import expit, logit
from scipy.stats import binomtest

from ..analysis.standard_error import clustered_standard_error
from .flip_curve import (
    HIGHEST,
    LOWEST,
    GoodnessOfFit,
    against_policy,
    goodness_of_fit,
    resampled_prompts,
    share_against,
)
from .scorers import BASIS, Scorer
from .votes import Cells, Evidence, judges_table

RESAMPLES = 200


@dataclass(frozen=True)
class Judged:
    """Votes of judges on some of N pairs, in the model of ``votes``."""

    table: pd.DataFrame
    """One row per judge: ``judge``, ``pairs`` asked about, verdicts ``for_label``, ``against_label`` and
    ``none``, and ``reliability`` with its 95% interval ``low`` to ``high``.
    """
    log_odds: np.ndarray
    """(N,) log-odds by score and votes that the label is right, in nats, before eps."""
    p_wrong: np.ndarray
    """(N,) P(wrong), the mean over resamples."""


@dataclass(frozen=True)
class NoiseRate:
    """The noise rate of N pairs by their u, or by their log-odds with votes of judges."""

    rate: float
    slope: float
    """k, per nat of u."""
    separates: bool
    """True if the scores fit the labels better than random labels, by BIC."""
    gain: float
    """BIC without wrong labels minus BIC with them."""
    tenths: pd.DataFrame
    """By abs(u): ``size`` (mean, nats), ``against`` (disagreeing), ``stderr``, ``fitted``, ``pairs``."""
    fit: GoodnessOfFit
    draws: np.ndarray
    """(R, 2) eps and k of the resamples; with judges (R, 2 + J), with their reliabilities."""
    known: bool = False
    assumed: bool = False
    """True if it is the fallback for a rate that cannot be estimated."""
    judged: Judged | None = None

    @property
    def stderr(self) -> float:
        """Standard error, by resampling prompts."""
        return 0.0 if self.known else float(np.std(self.draws[:, 0], ddof=1))

    @property
    def low(self) -> float:
        """Lower end of the 95% interval, by resampling prompts."""
        return float(np.quantile(self.draws[:, 0], 0.025))

    @property
    def high(self) -> float:
        """Upper end of the 95% interval."""
        return float(np.quantile(self.draws[:, 0], 0.975))

    @property
    def identified(self) -> bool:
        """True if the rate was given or is identifiable from the labels."""
        return self.known or (self.separates and self.gain > 0)

    @property
    def at_most(self) -> float:
        """Upper bound by the tenth with the largest abs(u): two standard errors above its ``against``.

        NaN if one prompt has all of these pairs.
        """
        top = self.tenths.iloc[-1]
        # With no disagreement among n labels the bound is 3 / n (95%).
        return float(max(top["against"] + 2 * top["stderr"], 3 / top["pairs"]))

    def wrong(self, u: np.ndarray) -> np.ndarray:
        """Return (N,) P(wrong) of each label; NaN if the rate is not identified."""
        if not self.identified:
            return np.full(len(u), np.nan)
        if self.judged is not None:
            return self.judged.p_wrong
        rates = np.clip(self.draws[:, 0], 1e-6, None)
        found = [expit(logit(rate) - k * u) for rate, k in zip(rates, self.draws[:, 1], strict=True)]
        return np.mean(found, axis=0)


def estimate_noise_rate(
    u: np.ndarray,
    prompts: np.ndarray,
    known: float | None = None,
    resamples: int = RESAMPLES,
    evidence: Evidence | None = None,
) -> NoiseRate:
    """Fit the model of ``votes``: eps (unless ``known``), k, and reliabilities of judges.

    ``u`` is (N,) scores under the labels, ``prompts`` (N,) numbers from 0; pairs of one prompt are resampled
    together. Without ``evidence`` only u counts. With judges the curve of the result is that of the log-odds
    of u and votes together, whose slope is 1.
    """
    evidence = evidence or Evidence.none(len(u))
    cells = Cells(u, evidence.votes, evidence.truth)
    whole = cells.counts(np.ones(len(u)))
    among = (LOWEST, HIGHEST) if known is None else (known, known)
    best, loss = cells.fit(whole, among)
    clean_loss, random_loss = (cells.fit(whole, (rate, rate))[1] for rate in (LOWEST, 0.5))
    start = np.maximum(best, 0.02)
    draws = [cells.fit(cells.counts(w), among, [start])[0] for w in resampled_prompts(prompts, resamples)]
    scale = np.array([1, 1 / cells.unit, *[1] * len(evidence.judges)])
    best, drawn = best * scale, np.reshape(draws, (-1, len(best))) * scale
    # Pairs of a prompt depend on each other, so the likelihood is divided by the design effect.
    penalty, effect = np.log(len(u)), design_effect(against_policy(u), prompts)
    separates = bool(2 * (random_loss - min(loss, clean_loss)) / effect > penalty)
    rate, slope = float(best[0]), float(best[1])
    judged, score = None, u
    if evidence.judges:
        score = slope * u + evidence.votes @ logit(best[2:])
        wrong = np.zeros(len(u))
        for eps, k, *a in drawn:
            wrong += expit(logit(eps) - k * u - evidence.votes @ logit(a)) / len(drawn)
        judged, slope = Judged(judges_table(evidence, best, drawn), score, wrong), 1.0
    size, against = np.abs(score), against_policy(score)
    fit = GoodnessOfFit(np.nan, 0)
    if separates:
        fit = goodness_of_fit(size, against, prompts, rate, slope, known is not None)
    return NoiseRate(
        rate=rate,
        slope=slope,
        separates=separates,
        gain=float(2 * (clean_loss - loss) / effect - penalty),
        tenths=tenths(size, against, prompts, rate, slope),
        fit=fit,
        draws=drawn,
        known=known is not None,
        judged=judged,
    )


def rate_by(
    pairs: pd.DataFrame, scorer: Scorer, known: float | None = None, evidence: Evidence | None = None
) -> NoiseRate:
    """Return the noise rate by one of the scores of N pairs; see ``estimate_noise_rate``."""
    u, prompts = (pairs[name].to_numpy() for name in (BASIS[scorer], "prompt"))
    return estimate_noise_rate(u, prompts, known, evidence=evidence)


@dataclass(frozen=True)
class SampleEstimate:
    """The noise rate by manual review of a random sample."""

    wrong: int
    right: int
    dropped: int
    unsure: int

    @property
    def read(self) -> int:
        """Number of labels marked wrong or right."""
        return self.wrong + self.right

    @property
    def rate(self) -> float:
        """Fraction of wrong labels among those; NaN without any."""
        return self.wrong / self.read if self.read else float("nan")

    @cached_property
    def interval(self) -> tuple[float, float]:
        """95% interval by Clopper and Pearson; NaN without labels."""
        if not self.read:
            return float("nan"), float("nan")
        found = binomtest(self.wrong, self.read).proportion_ci(0.95, method="exact")
        return float(found.low), float(found.high)

    @property
    def told(self) -> float | None:
        """The rate, or the interval's upper end if no label was wrong; None outside (0, 0.5)."""
        share = self.rate if self.wrong else self.interval[1]
        return share if 0 < share < 0.5 else None

    def contradicts(self, own: NoiseRate) -> bool:
        """Return whether the interval does not overlap that of an audit's own estimate."""
        low, high = self.interval
        return own.identified and not own.known and (low > own.high or high < own.low)

    def sentences(self, own: NoiseRate, used: NoiseRate) -> list[str]:
        """Return sentences on the sample, the audit's ``own`` estimate without it, and the rate ``used``."""
        if not self.read:
            return []
        out = ""
        if self.dropped or self.unsure:
            out = f"; {self.dropped} dropped and {self.unsure} unsure pairs are excluded"
        low, high = self.interval
        told = [
            f"Of {self.read:,} randomly sampled labels that were reviewed by hand, {self.wrong:,} are wrong: "
            f"{self.rate:.1%} (95% interval {low:.1%} to {high:.1%}){out}."
        ]
        if self.contradicts(own):
            told.append(
                f"That disagrees with the audit's own estimate, {own.rate:.1%} (95% interval {own.low:.1%} "
                f"to {own.high:.1%}): errors may depend on the pair, the policy may have memorised the "
                "labels, or the reviewer disagrees with the annotators."
            )
        if not used.known and used.identified:
            why = (
                "lies in this interval"
                if low <= used.rate <= high
                else "is used, since this rate is not below 50%"
            )
            told.append(f"The estimate that takes all decisions in, {used.rate:.1%}, {why}.")
        elif used.rate == self.told:
            why = "" if self.wrong else ", the upper end of the interval, since no sampled label is wrong"
            told.append(f"The audit uses a noise rate of {used.rate:.1%}{why}.")
        return told

    def table(self, own: NoiseRate) -> pd.DataFrame:
        """Return one row: counts of decisions, the rate with its interval, and the audit's own estimate."""
        counts = {name: getattr(self, name) for name in ("wrong", "right", "dropped", "unsure")}
        ends = (self.rate, *self.interval)
        found = (own.rate, own.low, own.high) if own.identified else (float("nan"),) * 3
        names = ("noise_rate", "low", "high", "own", "own_low", "own_high")
        row = counts | dict(zip(names, (*ends, *found), strict=True))
        return pd.DataFrame([row | {"contradicts": self.contradicts(own)}])


@dataclass(frozen=True)
class DecidedRate:
    """The noise rate used by an audit."""

    rate: NoiseRate
    notes: list[str]
    sample: pd.DataFrame | None
    """``SampleEstimate.table`` if a sample was read."""


def decide(
    pairs: pd.DataFrame,
    scorer: Scorer,
    noise_rate: float | None,
    fallback_noise_rate: float | None,
    memorised: bool,
    read: SampleEstimate | None = None,
    evidence: Evidence | None = None,
) -> DecidedRate:
    """Return the noise rate to use: the given one, else the estimate, which takes decisions in, too.

    The rate of a reviewed sample replaces an estimate outside of its interval, one that is not identified and
    one by ``memorised`` labels.

    ``fallback_noise_rate`` is assumed if the estimate fails or the scorer has ``memorised`` labels. A higher
    rate than the data allow would make u look nearly certain, and judges that contradict it unreliable.
    """
    estimate = partial(rate_by, pairs, scorer, evidence=evidence)
    notes: list[str] = []
    sample: pd.DataFrame | None = None
    if read is not None and read.read:
        own = rate_by(pairs, scorer)
        sample = read.table(own)
        found = own if evidence is None and noise_rate is None else estimate(noise_rate)
        low, high = read.interval
        agrees = found.identified and not memorised and low <= found.rate <= high
        if noise_rate is None and not agrees and read.told is not None:
            noise_rate = read.told
            found = estimate(noise_rate)
        notes += read.sentences(own, found)
    else:
        found = estimate(noise_rate)
    needed = noise_rate is None and (memorised or not found.identified)
    told = noise_rate is not None or (needed and fallback_noise_rate is not None)
    if told and not found.separates and not pairs["unpulled_u"].equals(pairs["u"]):
        pairs["unpulled_u"] = pairs["u"]  # subtracting self-influence leaves no signal
        found = estimate(noise_rate)
    # Uninformative scores separate labels at no rate.
    if needed and found.separates and fallback_noise_rate is not None:
        assumed, why = fallback_noise_rate, ""
        bounds = [] if memorised else [(found.at_most, "upper bound from the pairs with the largest |u|")]
        if bounds and found.judged is not None:
            bounds.append((found.high, "upper end of the interval that the judges' votes leave"))
        for bound, name in bounds:
            if bound < assumed:  # never, if it is NaN
                assumed, why = bound, f", the {name} (fallback: {fallback_noise_rate:g})"
        found = replace(estimate(assumed), assumed=True)
        notes.append(f"The noise rate cannot be estimated from these scores; {assumed:.3g} is assumed{why}.")
    return DecidedRate(found, notes, sample)


def design_effect(values: np.ndarray, clusters: np.ndarray) -> float:
    """Return the variance of a mean of N clustered 0/1 values relative to independent ones, at least 1.

    With a single cluster it is N.
    """
    alone = values.mean() * (1 - values.mean()) / max(len(values) - 1, 1)
    together = clustered_standard_error(values, clusters) ** 2
    if np.isnan(together):
        return float(len(values))
    return max(1.0, float(together / alone)) if alone > 0 else 1.0


def tenths(
    size: np.ndarray, against: np.ndarray, prompts: np.ndarray, rate: float, slope: float
) -> pd.DataFrame:
    """Return ``NoiseRate.tenths`` of N pairs: ``size`` is abs(u), ``against`` 1 for disagreeing labels."""
    order = np.argsort(size, kind="stable")
    rows = []
    for part in np.array_split(order, min(10, len(order))):
        fitted = share_against(rate, slope, size[part]).mean()
        error = clustered_standard_error(against[part], prompts[part])
        rows.append((size[part].mean(), against[part].mean(), error, fitted, len(part)))
    return pd.DataFrame(rows, columns=["size", "against", "stderr", "fitted", "pairs"])
