"""Noise that follows how clear a preference is, for rows that say so in their column ``eta``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_info
from scipy.special import expit, log_expit, logit

from pacmr_lightning.errors import UserError

from .base import LabelNoise
from .calibration import calibrated, check_share

LOG_RANGE = 30.0
"""Temperatures and strengths are looked for between exp(-30) and exp(30)."""


class NearTieNoise(LabelNoise):
    """Labels of near ties are flipped most: ``P(flip) = sigma(-|dr| / tau)``, dr = logit(eta).

    So people get wrong what is hard to tell (B-Pref, arXiv 2111.03026; Gao et al., arXiv 2404.09824).

    Args:
        share: expected share of flipped labels over the training rows, above 0 and below 0.5; it decides tau.
    """

    def __init__(self, share: float):
        check_share(share)
        self.share = share

    def probabilities(self, rows: Dataset) -> list[float]:
        """N probabilities, up to 0.5 at a tie.

        Raises:
            UserError: a row has no ``eta``, or the share cannot be reached.
        """
        gaps = np.abs(reward_gaps(rows, type(self).__name__))

        def flips(log_tau: float) -> np.ndarray:
            return expit(-gaps / math.exp(log_tau))

        why = "a tie is flipped with probability 0.5 at every tau"
        log_tau = calibrated(self.share, flips, -LOG_RANGE, LOG_RANGE, why)
        rank_zero_info(f"NearTieNoise: tau {math.exp(log_tau):.4g}")
        return flips(log_tau).tolist()


class TemperatureLabels(LabelNoise):
    """Labels as if drawn at another temperature: P(response found as chosen is preferred) = sigma(dr / tau).

    A negative control: the labels are Bradley-Terry draws again, whose rewards are those of before over tau.
    That only rescales DPO's beta, so no method should win once each has its best beta. As few labels change
    as that law allows: above tau 1 some of those that were drawn the likely way, P(flip) = 1 -
    sigma(dr / tau) / sigma(dr), below tau 1 some of those that were not.

    Args:
        tau: the temperature, above 0; labels are noisier above 1.
        share: the expected share of flipped labels over the training rows instead, above 0 and below 0.5; it
            decides tau, above 1.
    """

    def __init__(self, tau: float | None = None, share: float | None = None):
        if (tau is None) == (share is None):
            raise UserError(
                f"TemperatureLabels has tau {tau} and share {share}; give one of the two, such as tau 3."
            )
        if tau is not None and not 0 < tau < math.inf:
            raise UserError(f"tau is {tau}, but a temperature is a number above 0; 1 leaves labels as found.")
        if share is not None:
            check_share(share)
        self.tau = tau
        self.share = share

    def probabilities(self, rows: Dataset) -> list[float]:
        """N probabilities.

        Raises:
            UserError: a row has no ``eta``, or the share cannot be reached.
        """
        gaps = reward_gaps(rows, type(self).__name__)
        if self.share is None:
            assert self.tau is not None
            return redrawn(gaps, gaps / self.tau).tolist()

        def flips(log_tau: float) -> np.ndarray:
            return redrawn(gaps, gaps / math.exp(log_tau))

        why = "at an infinite tau both responses are equally likely to be preferred, and some labels stay"
        log_tau = calibrated(self.share, flips, 0.0, LOG_RANGE, why)
        rank_zero_info(f"TemperatureLabels: tau {math.exp(log_tau):.4g}")
        return flips(log_tau).tolist()


def redrawn(now: np.ndarray, then: np.ndarray) -> np.ndarray:
    """(N,) probabilities of a flip that make draws of one law draws of another, with the fewest flips.

    Where a label that prefers the response found as chosen was drawn with probability sigma(now), it is kept
    with probability sigma(then) / sigma(now), at most 1. By the same rule a label that prefers the other one
    stays with sigma(-then) / sigma(-now): after the flips P(prefers the first) = sigma(then).

    Args:
        now: (N,) log odds that the response found as chosen is preferred, under the law of the labels found.
        then: (N,) the same under the law wanted.
    """
    return -np.expm1(np.minimum(log_expit(then) - log_expit(now), 0.0))


def reward_gaps(rows: Dataset, kind: str) -> np.ndarray:
    """(N,) dr = logit(eta): how much more reward the response found as chosen has.

    Args:
        rows: the training rows.
        kind: the noise that needs to know, for the error.

    Raises:
        UserError: a row has no ``eta``.
    """
    known = rows["eta"][:]
    unknown = [pair for pair, eta in zip(rows["id"][:], known, strict=True) if eta is None]
    if unknown:
        raise UserError(
            f"{kind} needs eta, the probability that the chosen response is better, of every pair, but "
            f"{len(unknown)} of the {len(known)} training pairs have none, {unknown[0]!r} for one; add the "
            "column eta, or choose a kind of noise that does without."
        )
    return log_odds(known)


def log_odds(probabilities: Sequence[float]) -> np.ndarray:
    """(N,) logits."""
    # Probabilities that rounded to 0 or 1 have no finite one.
    return logit(np.clip(np.array(probabilities, dtype=float), 1e-12, 1 - 1e-12))
