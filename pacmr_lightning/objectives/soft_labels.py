"""Losses of soft labels."""

from torch import Tensor

from ..rewards import Rewards
from .base import Objective


class SoftLabelDifference(Objective):
    """The factor of p in the soft-label loss p l(u) + (1 - p) l(-u).

    The loss is l(-u) + p [l(u) - l(-u)], so p weighs this difference and ``rest`` has no weight. Everything
    linear in a pair's weight, such as VNet's update, uses the difference as its loss.

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
        """The objective's, which drop both labels."""
        return self.objective.pair_weights(ids)
