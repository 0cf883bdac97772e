"""Objectives that look at one pair at a time and are told nothing of its label: DPO, Hölder-DPO, IPO, R3M.

u is the implicit reward difference beta h, ls is logsigmoid.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..rewards import Rewards
from .base import Objective


class DPO(Objective):
    """Direct preference optimization: -ls(u) (paper, equation 1; arXiv 2305.18290)."""

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        return -F.logsigmoid(rewards.u)


class HolderDPO(Objective):
    """Hölder-DPO: -(1 + g) p^g + g p^(1 + g), p = sigmoid(u), g is ``gamma`` (arXiv 2505.17859, equation 12).

    Its slope is -g (1 + g) p^g (1 - p)^2, which tends to 0 on both sides: a pair that the policy holds for a
    wrong label pulls no more than one that it has learned ("redescending"). A pair pulls hardest at
    p = g / (2 + g), u = 0 with the paper's g; the loss lies between -1 and 0.

    Where the first response is preferred with probability q, it is smallest at u = logit(q) / (2 - g). From
    g = 2 on nothing holds u at a finite value: the majority's side is all that counts.

    Args:
        beta: see ``Objective``; the paper has 0.1.
        gamma: g, above 0; larger trusts labels less. The paper has 2.

    Raises:
        UserError: an argument is out of its range.
    """

    def __init__(self, beta: float = 0.1, gamma: float = 2.0):
        super().__init__(beta)
        if not 0 < gamma < math.inf:
            raise UserError(f"gamma is {gamma}, but it must be above 0 and finite (Hölder-DPO's is 2).")
        self.gamma = gamma

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        u, g = rewards.u, self.gamma
        # p^g (1 + g (1 - p)), whose 1 - p is not rounded away for large u.
        return -(g * F.logsigmoid(u)).exp() * (1 + g * torch.sigmoid(-u))


class IPO(Objective):
    """Identity preference optimization: (h - 1 / (2 beta))^2 (arXiv 2310.12036, equation 17).

    Args:
        beta: the paper's tau.
        length_normalize: False has sums of token log-ratios in h, as the paper writes it; True has each
            response's mean over its tokens, h = r_c / len_c - r_r / len_r, as TRL does. The two want betas
            of different size: a mean is tens of times smaller than a sum.
    """

    def __init__(self, beta: float = 0.1, length_normalize: bool = False):
        super().__init__(beta)
        self.length_normalize = length_normalize

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced.

        Raises:
            ValueError: ``length_normalize`` is on and the rewards bring no token counts.
        """
        h = rewards.h
        if self.length_normalize:
            if rewards.chosen_tokens is None or rewards.rejected_tokens is None:
                raise ValueError("length_normalize needs the numbers of response tokens (see Rewards.of)")
            chosen = (rewards.policy.chosen - rewards.reference.chosen) / rewards.chosen_tokens
            h = chosen - (rewards.policy.rejected - rewards.reference.rejected) / rewards.rejected_tokens
        return (h - 1 / (2 * self.beta)) ** 2


class R3M(Objective):
    """Robust reward modeling for DPO: min over d >= 0 of -ls(u + d) + lam d (arXiv 2406.15568, section 3.4).

    d is what the pair's label is off by, 0 for most pairs (an L1 penalty). With t = logit(1 - lam), the
    minimum is at d = max(0, t - u), the paper's equation 3.4. So the loss is -ls(u) where u >= t and its
    tangent below, -ls(t) + lam (t - u): no pair pulls harder than lam.

    Args:
        beta: see ``Objective``.
        lam: lambda, in (0, 1); near 1 it is DPO. The paper searches {0.65, 0.75, 0.85} on TL;DR and
            {0.75, 0.8, 0.85} on HH; 0.75 is the middle of the one and a member of the other, and calls a pair
            an outlier from u < -1.1 on.
    """

    def __init__(self, beta: float = 0.1, lam: float = 0.75):
        super().__init__(beta)
        if not 0 < lam < 1:
            raise UserError(f"lam is {lam}, but it must be between 0 and 1 (its paper tunes 0.65 to 0.85).")
        self.lam = lam

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        u = rewards.u
        t = math.log1p(-self.lam) - math.log(self.lam)
        # Below t, u + d is t, and -ls(t) is -log(1 - lam). Computing u + d would round t away for large u.
        return torch.where(u < t, self.lam * (t - u) - math.log1p(-self.lam), -F.logsigmoid(u))
