"""Weightings that learn nothing."""

from __future__ import annotations

import torch

from ..rewards import Rewards
from .base import Weighting, Weights


class Unweighted(Weighting):
    """Every pair counts 1: plain DPO."""

    def weights(self, rewards: Rewards) -> Weights:
        """(N,) ones."""
        return Weights(torch.ones_like(rewards.u))


class SigmoidPrior(Weighting):
    """Fixed weights g = sigmoid(slope u + offset); the paper's ablation (section 6.4) has slope 1, offset 0.

    By Theorem 1 the weights that undo symmetric flips at rate eps have slope 1 and offset logit(1 - eps).
    """

    def __init__(self, slope: float = 1.0, offset: float = 0.0):
        self.slope = slope
        self.offset = offset

    def weights(self, rewards: Rewards) -> Weights:
        """(N,) weights with their constant slope and offset."""
        u = rewards.u
        g = torch.sigmoid(self.slope * u + self.offset)
        return Weights(g, torch.full_like(u, self.slope), torch.full_like(u, self.offset))
