"""A weighting that learns: how much each pair's loss counts."""

from typing import Any

import torch
from torch import Tensor

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import StepPairs
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.strategies.ranks import sum_over_ranks
from pacmr_lightning.weighting import Weighting, Weights
from pacmr_lightning.weighting.algorithm_1 import weighted_gradient


class ConsensusWeights(Weighting):
    """g = sigmoid(slope u): pairs count more that pull where the batch as a whole pulls.

    The slope learns from how well each pair's gradient agrees with the weighted one.

    Args:
        every: the slope learns at policy updates 0, every, 2 every, ...
        learning_rate: of the slope's Adam.
    """

    needs_meta = False

    def __init__(self, every: int = 10, learning_rate: float = 0.05):
        if every < 1:
            raise UserError(f"every is {every}, but the slope learns every 1, 2, ... policy updates.")
        self.every = every
        self.slope = torch.zeros((), requires_grad=True)
        self.optimizer = torch.optim.Adam([self.slope], lr=learning_rate)

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """(N,) weights under the current slope."""
        return Weights(torch.sigmoid(self.slope * rewards.u).detach())

    def update(
        self, pairs: StepPairs, meta: PairBatch, learning_rate: float, peak: float
    ) -> dict[str, Tensor]:
        """One step of the slope towards pairs that agree with the weighted gradient."""
        consensus = weighted_gradient(pairs, self)
        # The gradient is over all ranks; its products and the rewards are this rank's.
        agreement = pairs.along(consensus.gradient)
        self.optimizer.zero_grad()
        with torch.enable_grad():
            (-agreement * torch.sigmoid(self.slope * consensus.rewards.u)).sum().backward()
        sum_over_ranks([self.slope.grad])  # so that the slope stays the same on all ranks
        self.optimizer.step()
        return {"consensus/slope": self.slope.detach().clone()}

    def to(self, device: torch.device) -> None:
        """Moves the slope."""
        self.slope.data = self.slope.data.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Slope and its optimizer."""
        return {"slope": self.slope.detach().clone(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.slope.data.copy_(state["slope"])
        self.optimizer.load_state_dict(state["optimizer"])
