"""Estimators of the coefficients c_i."""

from abc import ABC, abstractmethod

from torch import Tensor
from torch.nn.utils import get_total_norm

from ..errors import UserError, check_within
from ..policy import Direction
from .step_pairs import StepPairs


class MetaGradientEstimator(ABC):
    """Estimates c_i for N pairs, once per VNet update, on every rank.

    Args:
        clip: coefficients are clipped to [-clip, clip] (Qu et al.: 10); None for no clipping.

    Raises:
        UserError: ``clip`` is not above 0.
    """

    def __init__(self, clip: float | None = 10.0):
        check_within("(0, inf]", " (Qu et al.: 10) or null for none", clip=clip)
        self.clip = clip

    @abstractmethod
    def coefficients(self, pairs: StepPairs, direction: Direction) -> Tensor:
        """Return (N,) unclipped coefficients.

        Args:
            pairs: this rank's N train pairs at omega, which must not change: ``PolicyModel.shifted`` runs
                the policy elsewhere, where ``pairs.current_losses()`` are other losses.
            direction: d, full-size and the same on all ranks.
        """

    def clipped(self, coefficients: Tensor) -> Tensor:
        """Return (N,) clipped coefficients, which VNet learns from."""
        return coefficients if self.clip is None else coefficients.clamp(-self.clip, self.clip)


class CentralDifference(MetaGradientEstimator):
    """[l_i(omega + eps d) - l_i(omega - eps d)] / (2 eps), from two forward passes (Qu et al.).

    Args:
        epsilon: eps; Qu et al. use 3e-3.
        relative: the step is epsilon / norm(d), so its length does not depend on d's. Under a bf16 base a raw
            step along a short d drowns in rounding; 0.03 to 0.1 relative survives it.
        clip: see ``MetaGradientEstimator``.
    """

    def __init__(self, epsilon: float = 3e-3, relative: bool = False, clip: float | None = 10.0):
        super().__init__(clip)
        check_within("(0, inf)", " (Qu et al.: 0.003)", epsilon=epsilon)
        self.epsilon = epsilon
        self.relative = relative

    def coefficients(self, pairs: StepPairs, direction: Direction) -> Tensor:
        """Return (N,) unclipped coefficients."""
        if pairs.objective.holds_factors:
            name = type(pairs.objective).__name__
            raise UserError(
                f"CentralDifference takes differences of the loss, but {name} holds factors of it fixed; use "
                "GhostDotProduct."
            )
        step = self.epsilon / float(get_total_norm(direction.values())) if self.relative else self.epsilon
        sides = []
        for sign in (1, -1):
            with pairs.policy.shifted(direction, sign * step):
                sides.append(pairs.current_losses())
        return (sides[0] - sides[1]) / (2 * step)


class GhostDotProduct(MetaGradientEstimator):
    """c_i exactly by ghost dot products, in at most one ordinary backward pass (``StepPairs.along``)."""

    def coefficients(self, pairs: StepPairs, direction: Direction) -> Tensor:
        """Return (N,) unclipped coefficients."""
        return pairs.along(direction)
