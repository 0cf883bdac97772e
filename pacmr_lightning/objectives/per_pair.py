"""Per-pair objectives without a noise rate: DPO, Hölder-DPO, IPO, R3M, ROPO.

u is the implicit reward margin beta h, ls is logsigmoid.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import check_within
from ..rewards import Rewards
from .base import Objective


class DPO(Objective):
    """Direct preference optimization: -ls(u) (Qu et al., equation 1; arXiv 2305.18290), and an SFT term.

    Args:
        beta: see ``Objective``.
        sft_weight: at least 0; times the chosen response's mean negative log-probability per token, in nats.
            TRL's ``loss_type=["sigmoid", "sft"]`` has it with ``loss_weights=[1, sft_weight]``; there, tokens
            of a forward pass have the same weight, here pairs.
    """

    def __init__(self, beta: float = 0.1, sft_weight: float = 0.0):
        super().__init__(beta)
        check_within("[0, 1e30]", sft_weight=sft_weight)
        self.sft_weight = sft_weight

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses; raises ValueError if ``sft_weight`` lacks token counts."""
        losses = -F.logsigmoid(rewards.u)
        if not self.sft_weight:
            return losses
        tokens, _ = rewards.token_counts("sft_weight")
        return losses - self.sft_weight * rewards.policy.chosen / tokens


class HolderDPO(Objective):
    """Hölder-DPO: -(1 + g) p^g + g p^(1 + g), p = sigmoid(u), g is ``gamma`` (arXiv 2505.17859, equation 12).

    Its slope -g (1 + g) p^g (1 - p)^2 tends to 0 on both sides ("redescending") and is steepest at
    p = g / (2 + g), which is u = 0 for g = 2. If the first response is preferred with probability q,
    the minimum is at u = logit(q) / (2 - g); from g = 2 on it is infinite.

    Args:
        beta: see ``Objective``; 0.1 in arXiv 2505.17859.
        gamma: g, above 0; larger trusts labels less. 2 in arXiv 2505.17859.
    """

    def __init__(self, beta: float = 0.1, gamma: float = 2.0):
        super().__init__(beta)
        check_within("(0, inf)", " and finite (Hölder-DPO's is 2)", gamma=gamma)
        self.gamma = gamma

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses."""
        u, g = rewards.u, self.gamma
        # p^g (1 + g (1 - p)), without rounding 1 - p for large u.
        return -(g * F.logsigmoid(u)).exp() * (1 + g * torch.sigmoid(-u))


class IPO(Objective):
    """Identity preference optimization: (h - 1 / (2 beta))^2 (arXiv 2310.12036, equation 17).

    Args:
        beta: tau of arXiv 2310.12036.
        length_normalize: False has sums of token log-ratios in h, as in that paper; True has each
            response's mean over its tokens, h = r_c / len_c - r_r / len_r, as TRL does, and needs a beta of
            another size.
    """

    def __init__(self, beta: float = 0.1, length_normalize: bool = False):
        super().__init__(beta)
        self.length_normalize = length_normalize

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses; raises ValueError if ``length_normalize`` lacks token counts."""
        h = rewards.h
        if self.length_normalize:
            of_chosen, of_rejected = rewards.token_counts("length_normalize")
            chosen = (rewards.policy.chosen - rewards.reference.chosen) / of_chosen
            h = chosen - (rewards.policy.rejected - rewards.reference.rejected) / of_rejected
        return (h - 1 / (2 * self.beta)) ** 2


class R3M(Objective):
    """Robust reward modeling for DPO: min over d >= 0 of -ls(u + d) + lam d (arXiv 2406.15568, section 3.4).

    d is the pair's label error, 0 for most pairs (L1 penalty). With t = logit(1 - lam), the minimum is at
    d = max(0, t - u) (equation 3.4). So the loss is -ls(u) where u >= t, and its tangent -ls(t) + lam (t - u)
    below: the slope is at most lam.

    Args:
        beta: see ``Objective``.
        lam: lambda, in (0, 1); near 1 it is DPO. arXiv 2406.15568 searches {0.65, 0.75, 0.85} on TL;DR and
            {0.75, 0.8, 0.85} on HH; 0.75 is in both, and makes a pair an outlier from u < -1.1 on.
    """

    def __init__(self, beta: float = 0.1, lam: float = 0.75):
        super().__init__(beta)
        check_within("(0, 1)", " (usual: 0.65 to 0.85)", lam=lam)
        self.lam = lam

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses."""
        u = rewards.u
        t = math.log1p(-self.lam) - math.log(self.lam)
        # -ls(t) is -log(1 - lam); u + d would round t away for large u.
        return torch.where(u < t, self.lam * (t - u) - math.log1p(-self.lam), -F.logsigmoid(u))


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
