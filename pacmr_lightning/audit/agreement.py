"""p, the probability that another annotator agrees with a label.

A score u of N pairs, in nats, changes sign with the label and has not seen it. Of the labels at u the share

    c(u) = eps + (1 - 2 eps) sigmoid(k u)

agrees with the label's side. eps and k are fitted to the labels themselves, so no clean label is needed.
Verdicts v of judges (1 for the label, -1 against it, 0 for none) add v logit(a) to k u; a is the judge's
reliability, fitted together (Dawid and Skene, 1979).

Pairs with the same u differ in how many annotators would agree. c is taken as the mean of a Beta prior worth
s votes, and the label itself is a vote, like any further ones:

    p = (s c + votes for the label) / (s + votes)

Votes on pairs with several of them determine s. Single votes do not, and s is then ``SCORE_VOTES``.

If all errors are random flips, eps is their rate, and a label is right with the probability

    sigmoid((votes for - votes against) logit(1 - eps) + k u)

That is p where the rate is given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.special import betainc, betaln, expit, log_expit, logit

from ..policy.numerics import clustered_standard_error

LOWEST, HIGHEST = 1e-6, 0.499
"""Bounds of eps: its logarithm is finite, and at one half labels carry no information."""
STEEPEST = 100.0
"""Bound of k, per mean of abs(u)."""
SCORE_VOTES = 5.0
"""s without pairs that have several votes; measured on real votes (research/notebook)."""
_SURE = 1.5
"""Random scores pass in less than one case of a hundred, since their gain out of fold is negative."""
RESAMPLES = 200
FOLDS = 10
_TYPICAL = 1.5
"""k of a typical score, per mean of abs(u)."""
_SPREAD = 1.0
"""Standard deviation of the prior of log k above ``_TYPICAL``; the most likely k alone can be infinite."""
_SPREAD_OF_S = 0.5
"""Standard deviation of the prior of log s."""
RELIABILITIES = (0.5, 0.99)
"""Bounds of a; a judge is no worse than chance."""
_RELIABILITY = 0.75
"""a at which a search begins."""
_BINS = 256
_STARTS = ((0.02, 1.0), (0.25, 1.0))


@dataclass(frozen=True)
class Votes:
    """Votes on N pairs: annotators' labels as counts, and verdicts of J judges."""

    right: np.ndarray
    """(N,) votes for the label; a tie is half a vote for each side."""
    wrong: np.ndarray
    """(N,) votes against it."""
    verdicts: np.ndarray
    """(N, J) 1 for the label, -1 against it, 0 for none."""
    once: np.ndarray | EllipsisType = ...
    """(N,) True in one of the rows that have the same votes, which count once; default: in all rows."""

    @classmethod
    def single(cls, pairs: int) -> "Votes":
        """Return one vote on each of N pairs, the label."""
        return cls(np.ones(pairs), np.zeros(pairs), np.zeros((pairs, 0)))

    @property
    def total(self) -> np.ndarray:
        """(N,) number of votes."""
        return self.right + self.wrong

    def counted(self) -> "Votes":
        """Return those of the rows that count."""
        return Votes(self.right[self.once], self.wrong[self.once], self.verdicts[self.once])

    def margins(self, u: np.ndarray, parameters: np.ndarray) -> np.ndarray:
        """Return (N,) k u + sum of v logit(a), from eps, k and a."""
        return parameters[1] * u + self.verdicts @ logit(parameters[2:])

    def shares(self, u: np.ndarray, parameters: np.ndarray) -> np.ndarray:
        """Return (N,) c."""
        return parameters[0] + (1 - 2 * parameters[0]) * expit(self.margins(u, parameters))


@dataclass(frozen=True)
class Agreement:
    """Agreement of annotators with N labels, by a score."""

    p: np.ndarray
    """(N,) probability that another annotator agrees with the label; with a known rate, that it is right."""
    p_majority: np.ndarray
    """(N,) probability that most annotators would agree, by the same posterior; with a known rate, p."""
    margin: np.ndarray
    """(N,) k u, with v logit(a) of judges, in nats."""
    rate: float
    """eps."""
    slope: float
    """k, per nat of u."""
    gain: float
    """Mean log-likelihood of a vote out of fold minus that of a coin, in nats."""
    gain_error: float
    """Its standard error over prompts; NaN for fewer than two prompts."""
    flips: float
    """BIC without random flips (eps = 0) minus BIC with them, in prompts' worth of evidence."""
    strength: float
    """s, the number of votes that the score is worth."""
    draws: np.ndarray
    """(R, 2 + J) eps, k and a of resampled prompts."""
    expected: np.ndarray
    """(R + 1, N) probability of contradiction, 1 - p: estimated, then by resample."""
    reliabilities: np.ndarray
    """(J,) a."""
    known: bool = False
    """True if the rate of flips was given."""

    @property
    def predicts(self) -> bool:
        """True if the score predicts unseen labels better than a coin, by ``_SURE`` standard errors."""
        return self.gain > _SURE * self.gain_error

    @property
    def usable(self) -> bool:
        """True if p says something: labels are predicted, or the rate was given."""
        return self.known or self.predicts

    @property
    def identified(self) -> bool:
        """True if random flips explain the labels better than none."""
        return self.known or (self.predicts and self.flips > 0)

    @property
    def low(self) -> float:
        """Lower end of the rate's 95% interval, by resampling prompts."""
        return float(np.quantile(self.draws[:, 0], 0.025))

    @property
    def high(self) -> float:
        """Upper end of the rate's 95% interval."""
        return float(np.quantile(self.draws[:, 0], 0.975))

    def contradicted(self, which: np.ndarray) -> tuple[float, float, float]:
        """Return the expected fraction of contradicted labels among (N,) ``which``, and its 95% interval."""
        shares = self.expected[:, which].mean(1)
        low, high = np.quantile(shares[1:], (0.025, 0.975)) if len(shares) > 1 else (np.nan, np.nan)
        return float(shares[0]), float(low), float(high)


def agreement(
    u: np.ndarray,
    prompts: np.ndarray,
    votes: Votes | None = None,
    known: float | None = None,
    resamples: int = RESAMPLES,
) -> Agreement:
    """Fit the model of this file to N pairs.

    Args:
        u: (N,) scores under the labels, in any unit; of unseen labels, else p is too high.
        prompts: (N,) numbers from 0; pairs of a prompt are resampled together.
        votes: default: one vote per pair, the label.
        known: rate of random flips, if it is known.
        resamples: bootstrap resamples of the prompts, for intervals.
    """
    votes = votes or Votes.single(len(u))
    unit = float(np.abs(u[votes.once]).mean()) or 1.0
    u, counted, prompts = u / unit, votes.counted(), prompts[votes.once]
    cells = _Cells(u[votes.once], counted)
    rates = (LOWEST, HIGHEST) if known is None else (known, known)
    everything = np.ones(len(prompts))
    best, loss = cells.fit(everything, rates, _STARTS)
    _, clean_loss = cells.fit(everything, (LOWEST, LOWEST), _STARTS[:1])
    start = [np.maximum(best, 0.02)]
    resampled = resampled_prompts(prompts, resamples)
    draws = np.array([best, *(cells.fit(weights, rates, start)[0] for weights in resampled)])
    strength = _strength(counted.shares(cells.u, best), counted)
    strengths = np.exp(np.log(strength) + _SPREAD_OF_S * np.random.default_rng(0).standard_normal(len(draws)))
    strengths[0] = strength
    gain = cells.out_of_fold(prompts, rates, start)
    expected = np.empty((len(draws), len(u)), dtype=np.float32)
    for row, parameters, s in zip(expected, draws, strengths, strict=True):
        if known is None:
            row[:] = (s * (1 - votes.shares(u, parameters)) + votes.wrong) / (s + votes.total)
        else:
            row[:] = expit((votes.right - votes.wrong) * logit(known) - votes.margins(u, parameters))
    # The Beta posterior that more than half of the annotators agree.
    c = votes.shares(u, best)
    for_label, against = strength * c + votes.right, strength * (1 - c) + votes.wrong
    majority = betainc(against, for_label, 0.5) if known is None else 1 - expected[0]
    # Pairs of a prompt depend on each other, so the likelihood is divided by the design effect.
    share = counted.right / counted.total - 0.5  # above one half; below: for the side that the score prefers
    effect = design_effect(np.sign(counted.margins(cells.u, best)) * share, prompts)
    scale = np.array([1, 1 / unit, *[1] * (len(best) - 2)])
    return Agreement(
        p=1 - expected[0],
        p_majority=majority,
        margin=votes.margins(u, best),
        rate=float(best[0]),
        slope=float(best[1] / unit),
        gain=float(gain.mean()),
        gain_error=clustered_standard_error(gain, prompts),
        flips=float(2 * (clean_loss - loss) / effect - np.log(len(gain))),
        strength=strength,
        draws=draws[1:] * scale,
        expected=expected,
        reliabilities=best[2:],
        known=known is not None,
    )


class _Cells:
    """Pairs by score, of which those with equal verdicts and nearly equal u share a cell."""

    def __init__(self, u: np.ndarray, votes: Votes):
        self.u, self.votes = u, votes
        edges = np.unique(np.quantile(u, np.linspace(0, 1, _BINS + 1)[1:-1]))
        columns = np.column_stack([np.digitize(u, edges), votes.verdicts])
        kinds, cell = np.unique(columns, axis=0, return_inverse=True)
        self.cell, self.verdicts = cell.reshape(-1), kinds[:, 1:]
        self.means = np.bincount(self.cell, u) / np.bincount(self.cell)

    def fit(
        self, weights: np.ndarray, rates: tuple[float, float], starts: Sequence[Sequence[float]]
    ) -> tuple[np.ndarray, float]:
        """Return the most probable eps, k (per unit of u) and a for (N,) weights, and -log-likelihood.

        The truth is hidden: the label's side with probability sigmoid(k u). A vote agrees with it with
        probability 1 - eps, a verdict with a, whose prior is Beta(2, 2), as if the judge had been right once
        and wrong once before. So which pairs a judge sees may depend on u and the label.
        """
        votes, verdicts, means = self.votes, self.verdicts, self.means
        right = np.bincount(self.cell, weights * votes.right / votes.total)
        wrong = np.bincount(self.cell, weights * votes.wrong / votes.total)
        there, judges = verdicts != 0, verdicts.shape[1]
        bounds = [rates, (0.0, STEEPEST), *[RELIABILITIES] * judges]
        last = [0.0]

        def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
            rate, slope, a = parameters[0], parameters[1], parameters[2:]
            sizes, leans = there @ np.log(a * (1 - a)) / 2, verdicts @ logit(a) / 2
            yes, no = log_expit(slope * means) + sizes + leans, log_expit(-slope * means) + sizes - leans
            for_label = np.logaddexp(np.log1p(-rate) + yes, np.log(rate) + no)
            against = np.logaddexp(np.log(rate) + yes, np.log1p(-rate) + no)
            truth_for = np.exp(np.log1p(-rate) + yes - for_label)
            truth_against = np.exp(np.log(rate) + yes - against)
            agreeing = right @ truth_for + wrong @ (1 - truth_against)
            number = right + wrong
            truth = right * truth_for + wrong * truth_against
            named = np.where(verdicts > 0, truth[:, None], (number - truth)[:, None]) * there
            hits, asked = named.sum(0), number @ there
            above = max(slope, _TYPICAL)
            off = np.log(above / _TYPICAL) / _SPREAD
            gradient = np.empty(len(parameters))
            gradient[0] = (number.sum() - agreeing) / rate - agreeing / (1 - rate)
            gradient[1] = means @ (truth - number * expit(slope * means)) - off / (_SPREAD * above)
            gradient[2:] = (hits + 1) / a - (asked - hits + 1) / (1 - a)
            last[0] = float(-(right @ for_label + wrong @ against))
            return last[0] + off**2 / 2 - np.log(a * (1 - a)).sum(), -gradient

        firsts = ([*start, *[_RELIABILITY] * (judges + 2 - len(start))] for start in starts)
        minima = [minimize(loss, first, jac=True, method="L-BFGS-B", bounds=bounds) for first in firsts]
        best = min(minima, key=lambda minimum: minimum.fun).x
        loss(best)
        return best, last[0]

    def out_of_fold(
        self, prompts: np.ndarray, rates: tuple[float, float], starts: Sequence[Sequence[float]]
    ) -> np.ndarray:
        """(N,) log-likelihood of a pair's mean vote minus that of a coin, fitted to other prompts."""
        fold = np.random.default_rng(0).permutation(int(prompts.max()) + 1)[prompts] % FOLDS
        share = self.votes.right / self.votes.total
        gain = np.zeros(len(prompts))
        for number in np.unique(fold):
            out = fold == number
            if not out.all():
                parameters, _ = self.fit(np.where(out, 0.0, 1.0), rates, starts)
                c = np.clip(self.votes.shares(self.u, parameters)[out], 1e-6, 1 - 1e-6)
                gain[out] = share[out] * np.log(c) + (1 - share[out]) * np.log1p(-c) + np.log(2)
        return gain


def _strength(c: np.ndarray, votes: Votes) -> float:
    """Return the most probable s, by the beta-binomial likelihood of pairs with several votes."""
    several = votes.total > 1
    if not several.any():
        return SCORE_VOTES
    a, b, right, wrong = c[several], 1 - c[several], votes.right[several], votes.wrong[several]

    def loss(log_s: float) -> float:
        s = np.exp(log_s)
        prior = ((log_s - np.log(SCORE_VOTES)) / _SPREAD_OF_S) ** 2 / 2
        return float(prior - (betaln(s * a + right, s * b + wrong) - betaln(s * a, s * b)).sum())

    return float(np.exp(minimize_scalar(loss, bounds=(np.log(0.3), np.log(100)), method="bounded").x))


def resampled_prompts(prompts: np.ndarray, resamples: int) -> Iterator[np.ndarray]:
    """Yield (N,) pair weights of a bootstrap over prompts numbered from 0, the same in each call."""
    rng = np.random.default_rng(0)
    number = int(prompts.max()) + 1
    shares = np.full(number, 1 / number)
    for _ in range(resamples):
        yield rng.multinomial(number, shares)[prompts]


def design_effect(values: np.ndarray, clusters: np.ndarray) -> float:
    """Return the variance of a mean of N clustered values relative to independent ones, at least 1.

    With a single cluster it is N.
    """
    alone = values.var() / max(len(values) - 1, 1)
    together = clustered_standard_error(values, clusters) ** 2
    if np.isnan(together):
        return float(len(values))
    return max(1.0, float(together / alone)) if alone > 0 else 1.0
