"""Preference objectives that weigh a batch's pairs against each other, or learn from every step.

u is the implicit reward difference, ls is logsigmoid.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ..errors import UserError
from ..gradient import sum_over_ranks
from . import DPO, Objective
from ..rewards import Rewards


def _several_ranks() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


class DrDPO(DPO):
    """Distributionally robust DPO: -beta' log mean_i exp(-l_i / beta') over a group, l_i = -ls(u_i).

    (arXiv 2407.07880.) Its gradient is that of sum_i w_i l_i with w = softmax(-l / beta') over the group,
    held fixed. Calling the objective returns l_i; the group's part is ``group_weights``.

    Args:
        beta: see ``Objective``.
        beta_prime: beta', above 0; the larger, the closer to DPO. The paper has 1.0.
        group: "batch" is the optimizer-step batch over all ranks, so that neither micro-batches nor ranks
            change anything. "micro_batch" has a softmax in each micro-batch, which counts by its share of the
            pairs, as published code does; with micro-batches of one pair that is DPO.

    Raises:
        UserError: an argument is out of its range.
    """

    grouped = True

    def __init__(
        self,
        beta: float = 0.1,
        beta_prime: float = 1.0,
        group: Literal["batch", "micro_batch"] = "batch",
    ):
        super().__init__(beta)
        if not 0 < beta_prime < math.inf:
            raise UserError(
                f"beta_prime is {beta_prime}, but it must be above 0 and finite (the paper uses 1.0)."
            )
        if group not in ("batch", "micro_batch"):
            raise UserError(f"group is {group}, but Dr.DPO's group is batch or micro_batch.")
        self.beta_prime = beta_prime
        self.group = group

    def group_weights(self, losses: Tensor, micro_batch_size: int | None = None) -> Tensor:
        """(N,) weights, softmax(-l / beta') over the group. See ``Objective``."""
        if self.group == "batch":
            log_sum = self._log_sum(losses)
            return (-losses / self.beta_prime - log_sum).exp()
        total = self._count(losses)
        parts = self._micro_batches(losses, micro_batch_size)
        weights = [(-p / self.beta_prime).softmax(0) * len(p) / total for p in parts]
        return torch.cat(weights) if weights else losses

    def group_value(self, losses: Tensor, micro_batch_size: int | None = None) -> Tensor:
        """0-dim -beta' log mean exp(-l / beta'), or its mean over micro-batches. See ``Objective``."""
        total = self._count(losses)
        if self.group == "batch":
            return self.beta_prime * (total.log() - self._log_sum(losses))
        log_means = losses.new_zeros(())
        for p in self._micro_batches(losses, micro_batch_size):
            log_means += len(p) * ((-p / self.beta_prime).logsumexp(0) - math.log(len(p)))
        sum_over_ranks([log_means])
        return -self.beta_prime * log_means / total

    def _micro_batches(self, losses: Tensor, size: int | None) -> list[Tensor]:
        """As ``PairBatch.micro_batches`` cuts them; none where this rank has no pairs."""
        return [p for p in losses.split(size or max(len(losses), 1)) if len(p)]

    def _count(self, losses: Tensor) -> Tensor:
        """0-dim number of pairs over all ranks."""
        count = losses.new_tensor(len(losses))
        sum_over_ranks([count])
        return count

    def _log_sum(self, losses: Tensor) -> Tensor:
        """0-dim log sum exp(-l / beta') over all ranks; exp alone underflows in fp32 from l / beta' = 104."""
        x = -losses / self.beta_prime
        highest = x.max() if len(x) else x.new_tensor(-math.inf)
        if _several_ranks():
            torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
        sums = (x - highest).exp().sum()
        sum_over_ranks([sums])
        return highest + sums.log()


class ROPO(Objective):
    """ROPO: 4a / (1 + a)^2 [-ls(u) + a sigmoid(-u)], a is ``alpha``; and filtering (arXiv 2404.04102).

    The factor makes the steepest slope 1 (for a >= 1, at sigmoid(u) = (a - 1) / 2a), and pairs that disagree
    strongly with their label (u far below 0) keep 4a / (1 + a)^2 of it.

    The paper trains and filters in turn: minimize sum_i w_i l_i over the policy and over w in {0, 1} with a
    fixed number of ones, whose solution drops the pairs of largest loss. With ``filter_share`` this is done
    every ``filter_every`` updates: of all pairs seen so far, the share with the largest last-seen loss gets
    weight 0 until the next filtering, which decides anew (dropped pairs are still run and observed, and can
    come back). A pair's loss is refreshed when it is visited, so a run needs more than one epoch for this to
    change anything, and ``filter_every`` is best an epoch's number of updates. The step's loss stays divided
    by all of its pairs. The paper's rejection sampling of new responses is not part of this.

    Args:
        beta: see ``Objective``.
        alpha: a, above 0; larger trusts less. Other implementations give 14 as the paper's default and 6, 14
            and 30 as its ablation.
        filter_share: share of the pairs to drop, in (0, 1); None for no filtering.
        filter_every: policy updates between filterings; None without ``filter_share``.

    Raises:
        UserError: an argument is out of its range, or one of the filter options is without the other.
    """

    def __init__(
        self,
        beta: float = 0.1,
        alpha: float = 14.0,
        filter_share: float | None = None,
        filter_every: int | None = None,
    ):
        super().__init__(beta)
        if not 0 < alpha < math.inf:
            raise UserError(f"alpha is {alpha}, but it must be above 0 and finite (ROPO's default is 14).")
        if filter_share is None and filter_every is not None:
            raise UserError(f"filter_every is {filter_every}, but nothing is filtered; set filter_share too.")
        if filter_share is not None and not 0 < filter_share < 1:
            raise UserError(f"filter_share is {filter_share}, but it must be between 0 and 1, or null.")
        if filter_share is not None and (filter_every is None or filter_every < 1):
            raise UserError(
                f"filter_share is {filter_share} and filter_every {filter_every}, but filtering has to know "
                "when; set filter_every to the updates of an epoch."
            )
        self.alpha = alpha
        self.filter_share = filter_share
        self.filter_every = filter_every
        self._updates = 0
        self._last_loss: dict[str, float] = {}
        self._dropped: set[str] = set()

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        u, a = rewards.u, self.alpha
        return 4 * a / (1 + a) ** 2 * (a * torch.sigmoid(-u) - F.logsigmoid(u))

    def pair_weights(self, ids: list[str]) -> Tensor | None:
        """(N,) 0 for pairs that the last filtering dropped, 1 for others. See ``Objective``."""
        if not self._dropped:
            return None
        return torch.tensor([0.0 if name in self._dropped else 1.0 for name in ids])

    @torch.no_grad()
    def observe(self, rewards: Rewards, ids: list[str]) -> None:
        """Remembers each pair's loss; filters when it is time. See ``Objective``."""
        if self.filter_share is None:
            return
        seen = [(ids, self(rewards).tolist())]
        if _several_ranks():
            # All ranks remember all pairs: a checkpoint is written by one, and all have to drop the same.
            gathered: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(gathered, seen[0])
            seen = gathered
        for names, losses in seen:
            self._last_loss.update(zip(names, losses, strict=True))
        self._updates += 1
        if self._updates % self.filter_every == 0:
            self._filter()

    def _filter(self) -> None:
        # Ties are broken by id, so that all ranks and a resumed run agree.
        worst_first = sorted(self._last_loss.items(), key=lambda item: (-item[1], item[0]))
        self._dropped = {name for name, _ in worst_first[: round(self.filter_share * len(worst_first))]}
        rank_zero_info(
            f"ROPO at update {self._updates}: dropped {len(self._dropped)} of the {len(worst_first)} pairs "
            f"seen so far ({self.filter_share:.1%}), those with the largest losses."
        )

    def check_plan(self, updates: int, updates_per_epoch: int) -> None:
        """Refuses filtering in a run that visits no pair after the first filtering. See ``Objective``."""
        if self.filter_share is None:
            return
        if updates <= max(updates_per_epoch, self.filter_every):
            raise UserError(
                f"filter_share is {self.filter_share}, but in a run of {updates} updates "
                f"({updates_per_epoch} an epoch) with filter_every {self.filter_every} no pair is "
                "visited again after filtering; train for more epochs, or leave filter_share out."
            )

    def state_dict(self) -> dict[str, Any]:
        """Updates so far, the last-seen loss of each pair, and the dropped pairs."""
        if self.filter_share is None:
            return {}
        return {
            "updates": self._updates,
            "last_loss": dict(self._last_loss),
            "dropped": sorted(self._dropped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        super().load_state_dict(state)
        if state:
            self._updates = state["updates"]
            self._last_loss = dict(state["last_loss"])
            self._dropped = set(state["dropped"])


class RPOEM(Objective):
    """RE-PO (EM): -w ls(u) - (1 - w) ls(-u), w = sigmoid(u + logit(1 - eps)) held fixed (arXiv 2509.24159).

    w is the posterior probability that the label is right, eps the flip rate. After each update eps moves to
    the batch's mean of 1 - w: eps <- (1 - momentum) eps + momentum mean(1 - w). The gradient is that of the
    likelihood of labels that are flipped at rate eps, -log[(1 - eps) sigmoid(u) + eps sigmoid(-u)].

    Args:
        beta: see ``Objective``.
        initial_rate: eps before the first update, in (0, 0.5); at 0.5 a fresh policy (u = 0) has no gradient.
            The paper's main experiments are reported to start at 0.1 (a reliability of 0.9).
        momentum: how far eps moves at an update, in (0, 1]; the paper's is reported to be 0.1.

    Raises:
        UserError: an argument is out of its range.
    """

    holds_factors = True

    def __init__(self, beta: float = 0.1, initial_rate: float = 0.25, momentum: float = 0.1):
        super().__init__(beta)
        if not 0 < initial_rate < 0.5:
            raise UserError(
                f"initial_rate is {initial_rate}, but the flip rate to start from must be between 0 and 0.5."
            )
        if not 0 < momentum <= 1:
            raise UserError(f"momentum is {momentum}, but it must be above 0 and at most 1 (usual: 0.1).")
        self.momentum = momentum
        self.estimated_rate = initial_rate

    def right(self, rewards: Rewards) -> Tensor:
        """(N,) posterior probabilities w that the labels are right, detached."""
        eps = self.estimated_rate
        return torch.sigmoid(rewards.u.detach() + math.log1p(-eps) - math.log(eps))

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        u, w = rewards.u, self.right(rewards)
        return -w * F.logsigmoid(u) - (1 - w) * F.logsigmoid(-u)

    @torch.no_grad()
    def observe(self, rewards: Rewards, ids: list[str]) -> None:
        """Moves eps towards the mean of 1 - w over all ranks. See ``Objective``."""
        wrong = 1 - self.right(rewards)
        sums = torch.stack([wrong.sum(), wrong.new_tensor(len(wrong))])
        sum_over_ranks([sums])
        moved = (1 - self.momentum) * self.estimated_rate + self.momentum * float(sums[0] / sums[1])
        # Away from 0 and 1, from which EM never comes back and where the logit is infinite.
        self.estimated_rate = min(max(moved, 1e-6), 1 - 1e-6)

    def state_dict(self) -> dict[str, Any]:
        """The estimated rate."""
        return {"estimated_rate": self.estimated_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        super().load_state_dict(state)
        self.estimated_rate = state["estimated_rate"]
