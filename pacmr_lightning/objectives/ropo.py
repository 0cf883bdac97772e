"""ROPO: a noise-tolerant loss."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import check_within
from ..rewards import Rewards
from .base import Objective


class ROPO(Objective):
    """ROPO: 4a / (1 + a)^2 [-ls(u) + a sigmoid(-u)], a is ``alpha`` (arXiv 2404.04102).

    The factor makes the steepest slope 1 (for a >= 1, at sigmoid(u) = (a - 1) / 2a); far below 0 the slope
    tends to 4a / (1 + a)^2. That paper also filters pairs and samples new responses, which are not included.

    Args:
        beta: see ``Objective``.
        alpha: a, above 0; larger trusts less. Other implementations give 14 as its default and 6, 14
            and 30 as its ablation.
    """

    def __init__(self, beta: float = 0.1, alpha: float = 14.0):
        super().__init__(beta)
        check_within("(0, inf)", " and finite (ROPO's default is 14)", alpha=alpha)
        self.alpha = alpha

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses."""
        u, a = rewards.u, self.alpha
        return 4 * a / (1 + a) ** 2 * (a * torch.sigmoid(-u) - F.logsigmoid(u))
