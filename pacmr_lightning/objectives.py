"""Preference objectives: per-pair losses."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor

from .errors import UserError
from .rewards import Rewards


class Objective(ABC):
    """A preference loss, one value a pair; the weighting multiplies it, the module averages it.

    Args:
        beta: DPO temperature, which scales log(pi / pi_ref) to implicit rewards; above 0.

    Raises:
        UserError: beta is not above 0.
    """

    def __init__(self, beta: float = 0.1):
        if not beta > 0:
            raise UserError(f"beta is {beta}, but it must be above 0 (the paper uses 0.1).")
        self.beta = beta

    @abstractmethod
    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""


class DPO(Objective):
    """Direct preference optimization: -log sigmoid(u) (paper, equation 1; arXiv 2305.18290)."""

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        return -F.logsigmoid(rewards.u)
