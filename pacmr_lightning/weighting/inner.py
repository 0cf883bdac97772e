"""The inner problem's gradient: the weighted loss of one optimizer-step batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import PairBatch
from ..gradient import Direction, accumulated_gradient, sum_over_ranks
from ..objectives import Objective
from ..policy import PolicyModel
from ..rewards import Rewards
from .base import Weighting, Weights
from .pair_gradients import PairGradients


def pair_losses(policy: PolicyModel, objective: Objective, batch: PairBatch) -> Tensor:
    """(N,) losses of pairs that bring their reference log-probabilities."""
    return objective(Rewards.of(policy.log_probs(batch), batch, objective.beta))


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
    pairs: PairGradients | None = None,
) -> InnerStep:
    """The step's gradient under the current weights, which carry no gradient themselves.

    Weights with mean one are g_i over the mean of all g: one factor for the whole gradient, which is applied
    when the last micro-batch is done. An objective that weighs the batch's pairs against each other (Dr.DPO)
    needs all losses first: with several micro-batches they are computed once more, without gradient.

    Args:
        policy: at omega.
        objective: the per-pair loss.
        weighting: gives the weights.
        batch: this rank's pairs, which bring their reference log-probabilities.
        micro_batch_size: pairs a forward pass may hold; None for all.
        pairs: the same pairs' gradients at omega, where they were kept; nothing is run then.
    """
    rewards: list[Rewards] = []
    losses: list[Tensor] = []
    weights: list[Weights] = []
    total = torch.tensor(float(len(batch)), device=batch.input_ids.device)
    sum_over_ranks([total])
    group = None
    if objective.grouped and micro_batch_size is not None and micro_batch_size < len(batch):
        with torch.no_grad():
            parts = [pair_losses(policy, objective, p) for p in batch.micro_batches(micro_batch_size)]
        group = objective.group_weights(torch.cat(parts), micro_batch_size)

    def factors(part: PairBatch, found: Rewards, loss: Tensor, rows: slice) -> Tensor:
        """(n,) what the losses of the batch's ``rows`` count in the step's; keeps what they come from."""
        rewards.append(found.detach())
        losses.append(loss.detach())
        weights.append(weighting.weights(rewards[-1], part))
        if objective.grouped:
            share = objective.group_weights(losses[-1]) if group is None else group[rows]
        else:
            share = weights[-1].g.detach() / total
        kept = objective.pair_weights(part.ids)
        return share if kept is None else share * kept.to(share)

    def weighted_losses() -> Iterator[Tensor]:
        done = 0
        for part in batch.micro_batches(micro_batch_size):
            found = Rewards.of(policy.log_probs(part), part, objective.beta)
            loss = objective(found)
            yield (factors(part, found, loss, slice(done, done + len(part))) * loss).sum()
            done += len(part)

    if pairs is None:
        gradient = accumulated_gradient(policy.adapter(), weighted_losses())
    else:
        gradient = pairs.weighted(factors(batch, pairs.rewards, pairs.losses, slice(None)))
        sum_over_ranks(gradient.values())
    joined = Weights.cat(weights)
    mean = joined.g.sum() / total
    sum_over_ranks([mean])
    if weighting.mean_one:
        torch._foreach_div_(list(gradient.values()), mean)
    return InnerStep(gradient, Rewards.cat(rewards), torch.cat(losses), joined, mean, total)
