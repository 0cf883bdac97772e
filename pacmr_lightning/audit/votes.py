"""The model of a score u, the votes of judges, and decisions of a person.

A label is right with probability 1 - eps. Given that, three views of a pair are independent: u, by which it
is right with log-odds k u before the label is known; the vote of each judge, for the better response with the
probability a_j, the judge's reliability; and perhaps a decision, with a reliability of ``_PERSON``. So

    L = (1 - eps) sigmoid(k u) prod_j P(s_j | right) + eps sigmoid(-k u) prod_j P(s_j | wrong)
    logit P(right) = logit(1 - eps) + k u + sum_j s_j logit(a_j)

with s_j = 1 for the label, -1 against it, 0 for no verdict.

This is the model of Dawid and Skene (1979) with one reliability per judge and the label as an annotator;
without votes it is the curve of ``flip_curve``. Which pairs a judge or a person sees may depend on u and the
label, since both are in the likelihood of every pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import expit, log_expit, logit

from .flip_curve import STEEPEST, prior_of_slope, quantiles

_BINS = 256
_RELIABILITIES = (0.5, 0.99)
"""Bounds; a judge is no worse than chance."""
_PERSON = 0.98
"""Reliability of a decision; at 1 a single slip on a confident pair would decide the fit."""
_STARTS = ((0.02, 1.0), (0.25, 1.0))
_START = 0.75
"""Reliability at which a search begins."""


@dataclass(frozen=True)
class Evidence:
    """Votes and decisions on N pairs."""

    judges: Sequence[str]
    votes: np.ndarray
    """(N, J) 1 for the label, -1 against it, 0 for no verdict."""
    asked: np.ndarray
    """(N,) True for pairs that the judges were asked about."""
    truth: np.ndarray
    """(N,) 1 if a person decided that the label is right, -1 for wrong, 0 for neither."""

    @classmethod
    def none(cls, pairs: int) -> Evidence:
        """Return no votes and no decisions on N pairs."""
        zeros = np.zeros(pairs, dtype=int)
        return cls([], np.zeros((pairs, 0), dtype=int), zeros > 0, zeros)


class Cells:
    """Pairs that are alike in label, votes, truth and quantile of abs(u), of which there are few kinds."""

    def __init__(self, u: np.ndarray, votes: np.ndarray, truth: np.ndarray):
        places, means, self.unit = quantiles(np.abs(u), _BINS)
        columns = np.column_stack([places, np.where(u < 0, -1, 1), truth, votes])
        kinds, self.kind = np.unique(columns, axis=0, return_inverse=True)
        self.kind = self.kind.reshape(-1)
        self.u = kinds[:, 1] * means[kinds[:, 0]]
        self.truth, self.votes = kinds[:, 2], kinds[:, 3:]

    def counts(self, weights: np.ndarray) -> np.ndarray:
        """Return (C,) sums of (N,) weights."""
        return np.bincount(self.kind, weights, len(self.u))

    def fit(
        self,
        counts: np.ndarray,
        rates: tuple[float, float],
        starts: Sequence[Sequence[float]] = _STARTS,
    ) -> tuple[np.ndarray, float]:
        """Return the most probable eps, k (per mean of abs(u)) and reliabilities, and -log-likelihood.

        Reliabilities have the prior Beta(2, 2), as if each judge had been right once and wrong once before.
        """
        judges = self.votes.shape[1]
        bounds = [rates, (0.0, STEEPEST), *[_RELIABILITIES] * judges]
        lower, upper = map(np.array, zip(*bounds, strict=True))

        def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
            rate, slope, a = parameters[0], parameters[1], parameters[2:]
            likelihood, right = self._posterior(rate, slope, a)
            prior, by_slope = prior_of_slope(slope)
            prior -= np.log(a * (1 - a)).sum()
            gradient = np.empty(len(parameters))
            weighted = counts * right
            gradient[0] = (counts - weighted).sum() / rate - weighted.sum() / (1 - rate)
            gradient[1] = (counts * self.u * (right - expit(slope * self.u))).sum() - by_slope
            truthful = np.where(self.votes > 0, right[:, None], 1 - right[:, None]) * (self.votes != 0)
            for_truth = counts @ truthful
            votes = counts @ (self.votes != 0)
            gradient[2:] = (for_truth + 1) / a - (votes - for_truth + 1) / (1 - a)
            return prior - counts @ likelihood, -gradient

        found = [
            minimize(
                loss,
                np.clip([*start, *[_START] * (judges + 2 - len(start))], lower, upper),
                jac=True,
                method="L-BFGS-B",
                bounds=bounds,
                options={"ftol": 1e-12, "gtol": 1e-6 * counts.sum(), "maxiter": 500},
            )
            for start in starts
        ]
        best = min(found, key=lambda fit: fit.fun)
        return best.x, float(-counts @ self._posterior(best.x[0], best.x[1], best.x[2:])[0])

    def _posterior(self, rate: float, slope: float, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(C,) log-likelihoods, and P(right) by all views."""
        voted = (self.votes != 0) @ np.log(a * (1 - a)) / 2
        lean = self.votes @ logit(a) / 2
        right = np.log1p(-rate) + log_expit(slope * self.u) + voted + lean
        wrong = np.log(rate) + log_expit(-slope * self.u) + voted - lean
        lean = self.truth * logit(_PERSON) / 2
        right, wrong = right + lean, wrong - lean
        return np.logaddexp(right, wrong), expit(right - wrong)


JUDGES = ["judge", "pairs", "for the label", "against it", "no verdict", "reliability", "95% interval"]
"""Headings of ``judges_cells``."""


def judges_cells(table: pd.DataFrame) -> list[list[str]]:
    """Return the cells of ``judges_table`` as people read them."""
    return [
        [
            row["judge"],
            *(f"{row[name]:,}" for name in ("pairs", "for_label", "against_label", "none")),
            f"{row['reliability']:.1%}",
            f"{row['low']:.1%} to {row['high']:.1%}",
        ]
        for row in table.to_dict("records")
    ]


def judges_table(evidence: Evidence, best: np.ndarray, drawn: np.ndarray) -> pd.DataFrame:
    """Return one row per judge: pairs asked about, verdicts, and reliability with its 95% interval."""
    low, high = np.quantile(drawn[:, 2:], (0.025, 0.975), axis=0)
    votes, pairs = evidence.votes, int(evidence.asked.sum())
    return pd.DataFrame(
        {
            "judge": list(evidence.judges),
            "pairs": pairs,
            "for_label": (votes > 0).sum(0),
            "against_label": (votes < 0).sum(0),
            "none": pairs - (votes != 0).sum(0),
            "reliability": best[2:],
            "low": low,
            "high": high,
        }
    )
