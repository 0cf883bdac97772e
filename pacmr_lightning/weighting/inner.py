"""The inner problem's gradient: the weighted loss of one optimizer-step batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import LogProbs, PairBatch
from ..gradient import Direction, accumulated_gradient, sum_over_ranks
from ..objectives import Objective
from ..policy import PolicyModel
from ..rewards import Rewards
from .base import Weighting, Weights


@dataclass
class InnerStep:
    """The gradient of 1/N sum_i g_i l_i over the global batch, and this rank's pairs as they were there."""

    gradient: Direction
    rewards: Rewards
    """Of N pairs, detached."""
    losses: Tensor
    """(N,) unweighted losses, detached."""
    weights: Weights
    """Before any division by their mean."""
    mean_weight: Tensor
    """0-dim mean of g over the global batch."""
    total: Tensor
    """0-dim number of pairs in the global batch."""


def inner_step(
    policy: PolicyModel,
    objective: Objective,
    weighting: Weighting,
    batch: PairBatch,
    micro_batch_size: int | None,
) -> InnerStep:
    """Runs the pairs, which bring their reference log-probabilities; weights carry no gradient.

    Weights with mean one are g_i over the mean of all g: one factor for the whole gradient, which is applied
    when the last micro-batch is done.
    """
    log_probs: list[LogProbs] = []
    losses: list[Tensor] = []
    weights: list[Weights] = []
    total = torch.tensor(float(len(batch)), device=batch.input_ids.device)
    sum_over_ranks([total])

    def weighted_losses() -> Iterator[Tensor]:
        for part in batch.micro_batches(micro_batch_size):
            found = Rewards(policy.log_probs(part), part.reference, objective.beta)
            frozen = Rewards(found.policy.detach(), found.reference, found.beta)
            loss = objective(found)
            log_probs.append(frozen.policy)
            losses.append(loss.detach())
            weights.append(weighting.weights(frozen, part))
            yield (weights[-1].g.detach() * loss).sum() / total

    gradient = accumulated_gradient(policy.adapter(), weighted_losses())
    joined = Weights.cat(weights)
    mean = joined.g.sum() / total
    sum_over_ranks([mean])
    if weighting.mean_one:
        for tensor in gradient.values():
            tensor.div_(mean)
    rewards = Rewards(LogProbs.cat(log_probs), batch.reference, objective.beta)
    return InnerStep(gradient, rewards, torch.cat(losses), joined, mean, total)
