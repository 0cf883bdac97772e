"""The gradient of each pair's own loss, for all pairs from one forward and one backward pass.

A linear's weight gradient for one row is the sum over its tokens of g_t x_t^T, for inputs x and output
gradients g (arXiv 1510.01799). LoRA's matrices are so small that these sums by row take little memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import PairBatch
from ..objectives import Objective
from ..objectives.soft_labels import SoftLabelDifference
from ..policy import PolicyModel
from ..policy.lora import UnhookedLoraError
from ..policy.mixed_precision_lora import HalfLinear, weight_gradient, without_gradient
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
    losses, detached. A LoRA layer that does not see whole rows raises UnhookedLoraError.
    """
    # All outputs depend on it, so backward reaches all layers without computing weight gradients.
    anchor = torch.zeros((), device=batch.input_ids.device, requires_grad=True)
    rows = policy.rows(batch) if rows is None else rows
    policy.check_hooked()
    taking = take
    unused = set(policy.adapter())

    def take_now(name: str, gradients: Tensor) -> None:
        unused.discard(name)
        taking(name, gradients)

    with torch.enable_grad(), _watched(policy, rows.token_pair, len(batch), anchor, take_now):
        rewards, losses = pair_losses(policy, objective, batch, rows)
        twice = take_rest is not None
        torch.autograd.grad(losses.sum(), anchor, allow_unused=True, retain_graph=twice)
        if take_rest is not None:
            assert isinstance(objective, SoftLabelDifference), "only soft labels leave a rest"
            taking = take_rest
            torch.autograd.grad(rest_losses(objective, rewards, batch).sum(), anchor, allow_unused=True)
    for name in unused:
        nothing = policy.adapter()[name].new_zeros(len(batch), *shape(policy.adapter()[name]))
        take(name, nothing)
        if take_rest is not None:
            take_rest(name, nothing)
    return rewards.detach(), losses.detach()


@contextmanager
def _watched(policy: PolicyModel, owner: Tensor, pairs: int, anchor: Tensor, take: Take) -> Iterator[None]:
    """Backward must run inside and calls ``take``; ``owner`` is the (R, T) pair number of each token."""
    # Rows are pairs, or responses (chosen before rejected), or all packed in one.
    unpacked = _unpacking(owner[0], pairs) if len(owner) % pairs else None

    def watch(name: str, module: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        if not output.requires_grad:
            return None
        if output.shape[:-1] != owner.shape:
            raise UnhookedLoraError(
                "GhostDotProduct needs LoRA layers that see whole rows, but this model mixes the tokens "
                "of several rows (mixture of experts?); use CentralDifference."
            )

        def see(x: Tensor, gradient: Tensor) -> None:
            if unpacked is not None:
                x, gradient = unpacked(x), unpacked(gradient)
            rows = weight_gradient(module, x, gradient)
            take(name, rows if len(rows) == pairs else rows.unflatten(0, (-1, pairs)).sum(0))

        return _Watched.apply(output, inputs[0].detach(), anchor, see)

    handles = []
    try:
        for name, linear in policy.lora_linears().items():
            handles.append(linear.register_forward_hook(partial(watch, name)))
            if isinstance(linear, HalfLinear):
                handles.append(without_gradient(linear))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unpacking(owner: Tensor, pairs: int) -> Callable[[Tensor], Tensor]:
    """Return a function from one row's (1, T, H) to zero-padded (pairs, longest, H)."""
    sorted_owner, order = owner.sort(stable=True)
    counts = owner.bincount(minlength=pairs)
    column = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[sorted_owner]
    longest = int(counts.max())

    def unpacked(tokens: Tensor) -> Tensor:
        rows = tokens.new_zeros(pairs, longest, tokens.shape[2])
        rows[sorted_owner, column] = tokens[0, order]
        return rows

    return unpacked


class _Watched(torch.autograd.Function):
    """Identity; backward passes the layer's input and its output's gradient to ``see``."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, anchor: Tensor, see: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        # Saved by autograd, so that a checkpoint drops it; the layer keeps it anyway.
        ctx.save_for_backward(x)
        ctx.see = see
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.see(*ctx.saved_tensors, gradient)
        return gradient, None, None, None
