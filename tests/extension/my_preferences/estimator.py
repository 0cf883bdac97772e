"""An estimator for VNetWeighting: how far each training pair pulls along a direction."""

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from pacmr_lightning.meta_gradient import MetaGradientEstimator, StepPairs
from pacmr_lightning.policy import Direction


class OneSidedDifference(MetaGradientEstimator):
    """[l_i(omega + eps d / norm(d)) - l_i(omega)] norm(d) / eps, from two forward passes.

    Args:
        epsilon: length of the step.
        clip: bound that the coefficients approach; see ``MetaGradientEstimator``.
    """

    def __init__(self, epsilon: float = 0.05, clip: float | None = 10.0):
        super().__init__(clip)
        self.epsilon = epsilon

    @torch.no_grad()
    def coefficients(self, pairs: StepPairs, direction: Direction) -> Tensor:
        """(N,) unclipped coefficients."""
        step = self.epsilon / float(get_total_norm(direction.values()))
        before = pairs.current_losses()
        with pairs.policy.shifted(direction, step):
            return (pairs.current_losses() - before) / step

    def clipped(self, coefficients: Tensor) -> Tensor:
        """Squashed smoothly, so that the order of the largest stays."""
        return coefficients if self.clip is None else self.clip * torch.tanh(coefficients / self.clip)
