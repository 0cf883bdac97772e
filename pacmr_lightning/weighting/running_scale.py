"""Standardises columns by what earlier steps found of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ranks import sum_over_ranks

DECAY = 0.95
"""Share that mean and variance keep at a step: they look back on about 20."""
LARGEST = 5.0
"""Standard deviations at which a value is cut."""
CONSTANT = 1e-6
"""Standard deviation under which a column is taken for constant: what is left of it is rounding."""


class RunningScale(nn.Module):
    """(x - mean) / standard deviation, cut at 5 and -5; both are exponential over the steps before.

    A step uses what the steps before it have found, so a pair's value depends neither on the other pairs of
    its batch nor on how that is cut into micro-batches and ranks. Before the first step is over, and as long
    as a column is constant, its value is 0: that of a mean pair.

    Args:
        columns: F of them.
    """

    weight: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, columns: int):
        super().__init__()
        self.register_buffer("weight", torch.zeros(()))
        """Of all steps so far, 1 - DECAY^t: what divides out that the exponential sums start at 0."""
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("variance", torch.zeros(columns))

    def forward(self, x: Tensor) -> Tensor:
        """(N, F) values of (N, F)."""
        deviation = self.variance.sqrt()
        known = deviation > CONSTANT
        scaled = (x - self.mean) / torch.where(known, deviation, 1)
        return torch.where(known, scaled, 0).clamp(-LARGEST, LARGEST)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Takes this rank's (N, F) values of a step; all ranks call it together, once."""
        x = x.to(self.mean.dtype)
        sums = torch.cat([x.new_tensor([len(x)]), x.sum(0)])
        sum_over_ranks([sums])
        mean = sums[1:] / sums[0]
        # Around the step's own mean, so that a small spread beside a large mean keeps its digits.
        squares = (x - mean).square().sum(0)
        sum_over_ranks([squares])
        weight = DECAY * self.weight + (1 - DECAY)
        share = (1 - DECAY) / weight
        away = mean - self.mean
        self.variance.mul_(1 - share).add_(share * (squares / sums[0] + (1 - share) * away.square()))
        self.mean.add_(share * away)
        self.weight.copy_(weight)
