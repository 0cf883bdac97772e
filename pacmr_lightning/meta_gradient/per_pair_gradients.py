"""The gradient of each pair's own loss, for all pairs from one forward and one backward pass."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..batch import PairBatch
from ..objectives import Objective
from ..objectives.soft_labels import SoftLabelDifference
from ..policy import PolicyModel
from ..policy.lora_layer import PerPair, TokensOfPairs
from ..policy.token_layout import Rows
from ..rewards import Rewards
from ..strategies.sharding import shape

Take = Callable[[str, Tensor], None]
"""Called with an adapter parameter's name and its gradients of n pairs, (n, *shape)."""


def pair_losses(
    policy: PolicyModel,
    objective: Objective,
    batch: PairBatch,
    rows: Rows | None = None,
) -> tuple[Rewards, Tensor]:
    """Return rewards and (N,) losses of pairs with reference log-probabilities; dropped pairs have loss 0."""
    rewards = Rewards.of(policy.log_probs(batch, rows), batch, objective.beta)
    return rewards, _kept(objective, batch, objective(rewards))


def rest_losses(objective: SoftLabelDifference, rewards: Rewards, batch: PairBatch) -> Tensor:
    """Return the (N,) losses without weight under soft labels."""
    return _kept(objective, batch, objective.rest(rewards))


def _kept(objective: Objective, batch: PairBatch, losses: Tensor) -> Tensor:
    kept = objective.pair_weights(batch.ids)
    return losses if kept is None else losses * kept.to(losses)


def each_gradient(
    policy: PolicyModel,
    objective: Objective,
    batch: PairBatch,
    take: Take,
    take_rest: Take | None = None,
    rows: Rows | None = None,
) -> tuple[Rewards, Tensor]:
    """Call ``take`` with every parameter's gradients by pair, from one forward and one backward pass.

    A layer that is used several times gives as many parts, an unused one zeros. ``take_rest``, for soft
    labels, gets the gradients of ``rest_losses`` from a second backward pass. Returns rewards and (n,)
    losses, detached. A LoRA layer that does not see whole rows raises UnsupportedLoraError.
    """
    rows = policy.rows(batch) if rows is None else rows
    tokens, parameters, layers = (
        TokensOfPairs(rows.token_pair, len(batch)),
        policy.adapter(),
        policy.lora_layers(),
    )
    taking, unused = take, set(parameters)

    def take_now(names: tuple[str, str], *gradients: Tensor) -> None:
        unused.difference_update(names)
        for name, gradient in zip(names, gradients, strict=True):
            taking(name, gradient)

    def backward(losses: Tensor, again: bool) -> None:
        # It reaches all layers, and their nodes return nothing for the parameters.
        torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True, retain_graph=again)

    try:
        for names, layer in layers.items():
            layer.per_pair = PerPair(tokens, partial(take_now, names))
        with torch.enable_grad():
            rewards, losses = pair_losses(policy, objective, batch, rows)
            backward(losses, take_rest is not None)
            if take_rest is not None:
                assert isinstance(objective, SoftLabelDifference), "only soft labels leave a rest"
                taking = take_rest
                backward(rest_losses(objective, rewards, batch), False)
    finally:
        for layer in layers.values():
            layer.per_pair = None
    for name in unused:
        nothing = parameters[name].new_zeros(len(batch), *shape(parameters[name]))
        take(name, nothing)
        if take_rest is not None:
            take_rest(name, nothing)
    return rewards.detach(), losses.detach()
