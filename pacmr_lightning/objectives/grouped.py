"""Objectives that weigh the pairs of a group against each other."""

import math
from typing import Literal

import torch
from torch import Tensor

from ..errors import UserError, check_within
from ..strategies.ranks import several_ranks, sum_over_ranks
from .per_pair import DPO


class DrDPO(DPO):
    """Distributionally robust DPO: -beta' log mean_i exp(-l_i / beta') over a group, l_i = -ls(u_i).

    (arXiv 2407.07880.) Its gradient is that of sum_i w_i l_i with w = softmax(-l / beta') held fixed. Calling
    the objective returns l_i.

    Args:
        beta: see ``Objective``.
        beta_prime: beta', above 0; the larger, the closer to DPO. 1.0 in Qu et al.
        group: "batch" is the optimizer-step batch over all ranks. "micro_batch" has a softmax in each
            micro-batch, which counts by its share of the pairs, as published code does; with micro-batches of
            one pair that is DPO.
    """

    grouped = True

    def __init__(
        self,
        beta: float = 0.1,
        beta_prime: float = 1.0,
        group: Literal["batch", "micro_batch"] = "batch",
    ):
        super().__init__(beta)
        check_within("(0, inf)", " and finite (Qu et al.: 1.0)", beta_prime=beta_prime)
        if group not in ("batch", "micro_batch"):
            raise UserError(f"group is {group}, but Dr.DPO's group is batch or micro_batch.")
        self.beta_prime = beta_prime
        self.group = group

    def group_weights(self, losses: Tensor, micro_batch_size: int | None = None) -> Tensor:
        """(N,) weights, softmax(-l / beta') over the group."""
        if self.group == "batch":
            return (-losses / self.beta_prime - self._log_sum(losses)).exp()
        total = self._count(losses)
        parts = self._micro_batches(losses, micro_batch_size)
        weights = [(-p / self.beta_prime).softmax(0) * len(p) / total for p in parts]
        return torch.cat(weights) if weights else losses

    def group_value(self, losses: Tensor, micro_batch_size: int | None = None) -> Tensor:
        """0-dim -beta' log mean exp(-l / beta'), or its mean over micro-batches."""
        total = self._count(losses)
        if self.group == "batch":
            return self.beta_prime * (total.log() - self._log_sum(losses))
        log_means = losses.new_zeros(())
        for p in self._micro_batches(losses, micro_batch_size):
            log_means += len(p) * ((-p / self.beta_prime).logsumexp(0) - math.log(len(p)))
        sum_over_ranks([log_means])
        return -self.beta_prime * log_means / total

    def _micro_batches(self, losses: Tensor, size: int | None) -> list[Tensor]:
        return [p for p in losses.split(size or max(len(losses), 1)) if len(p)]

    def _count(self, losses: Tensor) -> Tensor:
        count = losses.new_tensor(len(losses))
        sum_over_ranks([count])
        return count

    def _log_sum(self, losses: Tensor) -> Tensor:
        """0-dim log sum exp(-l / beta') over all ranks; exp alone underflows in fp32 from l / beta' = 104."""
        x = -losses / self.beta_prime
        highest = x.max() if len(x) else x.new_tensor(-math.inf)
        if several_ranks():
            torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
        sums = (x - highest).exp().sum()
        sum_over_ranks([sums])
        return highest + sums.log()
