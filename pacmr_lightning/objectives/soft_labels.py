"""The loss of a soft label: of a label that is right with a probability."""

from __future__ import annotations

from torch import Tensor

from ..rewards import Rewards
from .base import Objective


class SoftLabelDifference(Objective):
    """What the probability p multiplies in the loss of a soft label.

    The loss p l(u) + (1 - p) l(-u) is l(-u) + p [l(u) - l(-u)], where l(-u) is the loss under the other
    label. So p is a weight of the difference, of which this is the value, and ``rest`` has no weight.
    Everything that is linear in a pair's weight, VNet's update with it, takes the difference for its loss.

    Args:
        objective: l, which must not be grouped.
    """

    def __init__(self, objective: Objective):
        super().__init__(objective.beta)
        self.objective = objective
        self.holds_factors = objective.holds_factors

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) differences l(u) - l(-u)."""
        return self.objective(rewards) - self.rest(rewards)

    def rest(self, rewards: Rewards) -> Tensor:
        """(N,) losses l(-u)."""
        return self.objective(rewards.exchanged())

    def pair_weights(self, ids: list[str]) -> Tensor | None:
        """Those of the objective; they drop both labels."""
        return self.objective.pair_weights(ids)
