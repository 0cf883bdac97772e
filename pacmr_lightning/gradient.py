"""Gradients with respect to the adapter, accumulated over micro-batches and summed over ranks.

They are taken with ``torch.autograd.grad`` and not with ``backward``: ``p.grad`` stays untouched until the
policy's update, and no wrapper (DDP, DeepSpeed) mistakes a gradient of the outer step for one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
def sum_over_ranks(tensors: Iterable[Tensor]) -> None:
    """All-reduces the tensors in place, in one message; does nothing in a single process."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    tensors = list(tensors)
    flat = torch.cat([t.reshape(-1) for t in tensors])
    torch.distributed.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def on_all_ranks(values: list[Any]) -> list[Any]:
    """The ranks' lists one after the other, the same on all of them."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return values
    lists: list[list[Any]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lists, values)
    return [value for part in lists for value in part]


def max_over_ranks(value: int, device: torch.device) -> int:
    """The largest of the ranks' values."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value
    largest = torch.tensor(value, device=device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return int(largest)


@torch.no_grad()
def spread_over_ranks(tensors: Iterable[Tensor]) -> float:
    """Largest difference between the ranks' tensors, element by element; 0 in a single process."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return 0.0
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    ends = torch.stack([flat, -flat])
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
    return float(ends.sum(0).max())


@torch.no_grad()
def clip(direction: Direction, max_norm: float) -> None:
    """Scales a point of LoRA space down, in place, to a norm of at most ``max_norm``."""
    factor = (max_norm / (torch.nn.utils.get_total_norm(direction.values()) + 1e-6)).clamp(max=1.0)
    for tensor in direction.values():
        tensor.mul_(factor)


def norm(direction: Direction) -> Tensor:
    """Euclidean norm of a point of LoRA space, a 0-dim tensor."""
    return torch.stack([t.norm() for t in direction.values()]).norm()
