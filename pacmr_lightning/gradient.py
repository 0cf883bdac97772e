"""Gradients with respect to the adapter, accumulated over micro-batches and summed over ranks.

They are taken with ``torch.autograd.grad`` and not with ``backward``: ``p.grad`` stays untouched until the
policy's update, and no wrapper (DDP, DeepSpeed) mistakes a gradient of the outer step for one of its own.
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
    total = {name: p.new_zeros(shape(p)) for name, p in parameters.items()}
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        for buffer, gradient in zip(total.values(), gradients, strict=True):
            buffer.add_(gradient)
    sum_over_ranks(total.values())
    return total


@torch.no_grad()
def clip(direction: Direction, max_norm: float) -> None:
    """Scales a point of LoRA space down, in place, to a norm of at most ``max_norm``."""
    factor = (max_norm / (torch.nn.utils.get_total_norm(direction.values()) + 1e-6)).clamp(max=1.0)
    for tensor in direction.values():
        tensor.mul_(factor)


def norm(direction: Direction) -> Tensor:
    """Euclidean norm of a point of LoRA space, a 0-dim tensor."""
    return torch.stack([t.norm() for t in direction.values()]).norm()
