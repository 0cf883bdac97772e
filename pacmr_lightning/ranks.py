"""What the processes of a run tell each other; where there is one, nothing is sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def several_ranks() -> bool:
    """Whether this process is one of several that train together."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1


@torch.no_grad()
def sum_over_ranks(tensors: Iterable[Tensor]) -> None:
    """All-reduces the tensors in place, in one message; does nothing in a single process."""
    if not several_ranks():
        return
    tensors = list(tensors)
    flat = torch.cat([t.reshape(-1) for t in tensors])
    torch.distributed.all_reduce(flat)
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [p.view_as(t) for p, t in zip(parts, tensors, strict=True)])


def on_all_ranks(values: list[T]) -> list[T]:
    """The ranks' lists of picklable values one after the other."""
    if not several_ranks():
        return values
    lists: list[list[T]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lists, values)
    return [value for part in lists for value in part]


def max_over_ranks(value: int, device: torch.device) -> int:
    """The largest of the ranks' values."""
    if not several_ranks():
        return value
    largest = torch.tensor(value, device=device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return int(largest)


@torch.no_grad()
def spread_over_ranks(tensors: Iterable[Tensor]) -> float:
    """Largest difference between the ranks' tensors, element by element; 0 in a single process."""
    if not several_ranks():
        return 0.0
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    ends = torch.stack([flat, -flat])
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
    return float(ends.sum(0).max())
