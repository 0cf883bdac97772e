"""Communication between the processes of a run; a single process sends nothing."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def ranks() -> int:
    """Return how many processes train together."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


@torch.no_grad()
def sum_over_ranks(tensors: Iterable[Tensor]) -> None:
    """Sum the tensors over ranks in place, in one message."""
    if ranks() == 1:
        return
    tensors = list(tensors)
    flat = torch.cat([t.reshape(-1) for t in tensors])
    torch.distributed.all_reduce(flat)
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [p.view_as(t) for p, t in zip(parts, tensors, strict=True)])


def on_all_ranks(values: list[T]) -> list[T]:
    """Return the concatenated lists of all ranks; the values must be picklable."""
    if ranks() == 1:
        return values
    lists: list[list[T]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lists, values)
    return [value for part in lists for value in part]


def max_over_ranks(value: int, device: torch.device) -> int:
    """Return the largest of the ranks' values."""
    if ranks() == 1:
        return value
    largest = torch.tensor(value, device=device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return int(largest)


def min_over_ranks(value: int, device: torch.device) -> int:
    """Return the smallest of the ranks' values."""
    return -max_over_ranks(-value, device)
