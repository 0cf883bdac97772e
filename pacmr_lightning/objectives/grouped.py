"""Objectives that weigh the pairs of a batch against each other."""

import math

import torch
from torch import Tensor

from ..errors import check_within
from ..strategies.ranks import ranks, sum_over_ranks
from .per_pair import DPO


class DrDPO(DPO):
    """Distributionally robust DPO: -beta' log mean_i exp(-l_i / beta') over a batch, l_i = -ls(u_i).

    (arXiv 2407.07880.) Its gradient is that of sum_i w_i l_i with w = softmax(-l / beta') held fixed. Calling
    the objective returns l_i. The batch is that of an optimizer step over all ranks.

    >>> DrDPO().group_weights(torch.tensor([0.1269, 2.1269]))
    tensor([0.8808, 0.1192])

    Args:
        beta: see ``Objective``.
        beta_prime: beta', above 0; the larger, the closer to DPO. 1.0 in Qu et al.
    """

    grouped = True

    def __init__(self, beta: float = 0.1, beta_prime: float = 1.0):
        super().__init__(beta)
        check_within("(0, inf)", " and finite (Qu et al.: 1.0)", beta_prime=beta_prime)
        self.beta_prime = beta_prime

    def group_weights(self, losses: Tensor) -> Tensor:
        """(N,) weights, softmax(-l / beta') over the batch."""
        return (-losses / self.beta_prime - self._log_sum(losses)).exp()

    def group_value(self, losses: Tensor) -> Tensor:
        """0-dim -beta' log mean exp(-l / beta')."""
        count = losses.new_tensor(len(losses))
        sum_over_ranks([count])
        return self.beta_prime * (count.log() - self._log_sum(losses))

    def _log_sum(self, losses: Tensor) -> Tensor:
        """0-dim log sum exp(-l / beta') over all ranks; exp alone underflows in fp32 from l / beta' = 104."""
        x = -losses / self.beta_prime
        highest = x.max() if len(x) else x.new_tensor(-math.inf)
        if ranks() > 1:
            torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
        sums = (x - highest).exp().sum()
        sum_over_ranks([sums])
        return highest + sums.log()
