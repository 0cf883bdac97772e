"""Fixed sigmoid weighting: the ablation without VNet."""

import math
from typing import Literal

import torch

from ..batch import PairBatch
from ..errors import UserError, check_within
from ..rewards import Rewards, Weights
from .base import Weighting


class SigmoidPrior(Weighting):
    """Fixed weights g = c + (1 - c) sigmoid(a u + b); the ablation (section 6.4) has a = 1, b = 0 and c = 0.

    >>> from ..batch import LogProbs
    >>> zeros = torch.zeros(2)
    >>> rewards = Rewards(LogProbs(torch.tensor([2.0, -1.0]), zeros), LogProbs(zeros, zeros), beta=1.0)
    >>> SigmoidPrior().weights(rewards, batch=None).g
    tensor([0.8808, 0.2689])

    Args:
        slope: a.
        offset: b; "auto" is logit(1 - rate) of the datamodule's noise rate. With slope 1 these weights
            satisfy Theorem 1 exactly under symmetric flips: they are the posterior that the label is right.
        floor: c, the smallest weight, which keeps DPO's restoring force (docs/methods.md).
    """

    kept = ("offset",)

    def __init__(self, slope: float = 1.0, offset: float | Literal["auto"] = 0.0, floor: float = 0.0):
        check_within("[0, 1)", floor=floor)
        self.floor = floor
        self.slope = slope
        self.offset = self._asked = offset

    def set_label_noise(self, rate: float, uniform: bool = True) -> None:
        """Set the offset if "auto" was given."""
        if self._asked == "auto":
            self.offset = auto_offset(rate)

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Return (N,) weights with their constant slope and offset."""
        assert self.offset != "auto", "set_label_noise resolves it"
        u = rewards.u
        g = self.floor + (1 - self.floor) * torch.sigmoid(self.slope * u + self.offset)
        return Weights(g, torch.full_like(u, self.slope), torch.full_like(u, self.offset))


def auto_offset(rate: float) -> float:
    """Return logit(1 - rate): Theorem 1's offset for slope 1 under symmetric flips, rate in (0, 0.5)."""
    if not 0 < rate < 0.5:
        raise UserError(
            f"The offset is auto, but the datamodule's noise_rate is {rate}; logit(1 - rate) needs a rate "
            "between 0 and 0.5, so give the offset as a number."
        )
    return math.log((1 - rate) / rate)
