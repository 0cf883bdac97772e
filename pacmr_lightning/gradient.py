"""Gradients with respect to the adapter, accumulated over micro-batches and summed over ranks.

They are taken with ``torch.autograd.grad`` and not with ``backward``: ``p.grad`` stays untouched until the
policy's update, and no wrapper (DDP, DeepSpeed) mistakes a gradient of the outer step for one of its own.

An adapter is hundreds of small tensors, of which a GPU takes longer to be told than to compute them, so what
is done to each is done to all at once (``torch._foreach_...``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from .ranks import sum_over_ranks
from .strategies.sharding import shape

Direction = dict[str, Tensor]
"""A point of LoRA space: a tensor for each adapter parameter, by name."""


def accumulated_gradient(parameters: Mapping[str, nn.Parameter], losses: Iterable[Tensor]) -> Direction:
    """Sum over ranks and micro-batches of the gradients of scalar losses.

    Each loss must already be divided by the number of pairs of the whole step (all micro-batches, all ranks).
    The losses are consumed one at a time, so only one graph is alive.
    """
    total = _zeros(parameters)
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        torch._foreach_add_(list(total.values()), gradients)
    sum_over_ranks(total.values())
    return total


def _zeros(parameters: Mapping[str, nn.Parameter]) -> Direction:
    """Parts of one tensor."""
    shapes = {name: shape(p) for name, p in parameters.items()}
    sizes = [size.numel() for size in shapes.values()]
    parts = next(iter(parameters.values())).new_zeros(sum(sizes)).split(sizes)
    return {name: part.view(size) for (name, size), part in zip(shapes.items(), parts, strict=True)}


@torch.no_grad()
def clip(direction: Direction, max_norm: float) -> None:
    """Scales a point of LoRA space down, in place, to a norm of at most ``max_norm``."""
    torch._foreach_mul_(list(direction.values()), (max_norm / (norm(direction) + 1e-6)).clamp(max=1.0))


def norm(direction: Direction) -> Tensor:
    """Euclidean norm of a point of LoRA space, a 0-dim tensor."""
    return torch.nn.utils.get_total_norm(direction.values())
