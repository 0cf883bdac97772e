"""Weight 1 for every pair: plain DPO."""

from __future__ import annotations

import torch

from ..batch import PairBatch
from ..rewards import Rewards
from .base import Weighting, Weights


class Unweighted(Weighting):
    """Weight 1 for every pair: plain DPO."""

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Return (N,) ones."""
        return Weights(torch.ones_like(rewards.u))
