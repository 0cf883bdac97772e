"""Weightings from true labels or preference probabilities: upper bounds."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..batch import PairBatch
from ..errors import UserError, check_within
from ..rewards import Rewards, Weights
from .base import Weighting

RHO0, RATES = 0.5, "[0, 0.5)"
"""Scale of the weights, and the noise rates below 1 - rho0."""


def log_noisy_over_clean(s: Tensor, eps0: Tensor, eps1: Tensor) -> Tensor:
    """Return log(q / eta), eta = sigmoid(s), q = (1 - eps0) eta + eps1 (1 - eta): appendix D's 1 / g+."""
    return torch.logaddexp(torch.log1p(-eps0), eps1.log() - s)


class OracleWeights(Weighting):
    """Weights of Qu et al., appendix D, from every pair's known eta and the noise rate.

    With the chosen response first, g+ = rho0 e^s / (eps + (1 - eps) e^s), s = logit(eta). Under symmetric
    flips the other order gives the same. rho0, of which the optimum is free, is ``RHO0``.

    Args:
        label_noise: noise rate eps, in [0, 1 - rho0); "auto" is the datamodule's noise rate.
    """

    kept = ("label_noise",)

    def __init__(self, label_noise: float | Literal["auto"] = "auto"):
        self.label_noise = self._asked = label_noise
        if label_noise != "auto":
            check_within(RATES, label_noise=label_noise)

    def set_label_noise(self, rate: float, uniform: bool = True) -> None:
        """Set the rate if "auto" was given."""
        if self._asked == "auto":
            if not uniform:
                raise UserError(
                    "OracleWeights needs one noise rate for all pairs, but the noise has several; use "
                    "noise_rate for the noise, or DropFlipped as the weighting."
                )
            check_within(RATES, label_noise=rate)
            self.label_noise = rate

    def check_pairs(self, pairs: Any) -> None:
        """Refuse pairs of unknown eta."""
        if None in pairs.rows["eta"][:]:
            raise UserError(
                "OracleWeights needs eta, the probability that the chosen response is better, of every pair; "
                "add the column eta to the rows, or train on the synthetic benchmark."
            )

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Return (N,) weights."""
        assert self.label_noise != "auto", "set_label_noise resolves it"
        assert batch.eta is not None, "check_pairs refuses it"
        # Rounded probabilities 0 and 1 have no finite logit. On the CPU, since a device may lack float64.
        s = torch.logit(batch.eta.cpu().double(), eps=1e-12)
        eps = torch.tensor(self.label_noise, dtype=torch.float64)
        return Weights((math.log(RHO0) - log_noisy_over_clean(s, eps, eps)).exp().to(rewards.u))


class DropFlipped(Weighting):
    """Weight 0 for pairs whose label is known to be flipped, 1 for the others."""

    def check_pairs(self, pairs: Any) -> None:
        """Refuse pairs of unknown flips."""
        if any(flip < 0 for flip, tie in zip(pairs.flipped, pairs.ties, strict=True) if not tie):
            raise UserError(
                "DropFlipped needs a known flip of every pair; add the column flipped to the rows, or inject "
                "the noise with noise_rate."
            )

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Return (N,) zeros and ones."""
        return Weights((batch.flipped != 1).to(rewards.u.dtype))
