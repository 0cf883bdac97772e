"""Gradients with respect to the adapter, accumulated over micro-batches and summed over ranks.

They are taken with ``torch.autograd.grad`` and not with ``backward``: ``p.grad`` stays untouched until the
policy's update, and no wrapper (DDP, DeepSpeed) mistakes a gradient of the outer step for one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Direction = dict[str, Tensor]
"""A point of LoRA space: a tensor for each adapter parameter, by name."""


def accumulated_gradient(parameters: Mapping[str, Tensor], losses: Iterable[Tensor]) -> Direction:
    """Sum over ranks and micro-batches of the gradients of scalar losses.

    Each loss must already be divided by the number of pairs of the whole step (all micro-batches, all ranks).
    The losses are consumed one at a time, so only one graph is alive.
    """
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        for buffer, gradient in zip(total.values(), gradients, strict=True):
            buffer.add_(gradient)
    sum_over_ranks(total.values())
    return total


@torch.no_grad()
def sum_over_ranks(tensors: Iterable[Tensor]) -> None:
    """All-reduces the tensors in place, in one message; does nothing in a single process."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    tensors = list(tensors)
    flat = torch.cat([t.reshape(-1) for t in tensors])
    torch.distributed.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def norm(direction: Direction) -> Tensor:
    """Euclidean norm of a point of LoRA space, a 0-dim tensor."""
    return torch.stack([t.norm() for t in direction.values()]).norm()
