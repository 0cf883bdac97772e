"""Gradients of the adapter, by ``autograd.grad`` to leave ``p.grad`` and wrappers (DDP, DeepSpeed) alone."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..strategies.sharding import shape

Direction = dict[str, Tensor]
"""A tensor for each adapter parameter, by name."""


def add_gradient(total: Direction, parameters: Mapping[str, nn.Parameter], loss: Tensor) -> None:
    """Add a loss's gradient to ``total``, this rank's sum so far; frees the loss's graph."""
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    # _foreach_ saves hundreds of kernel launches.
    torch._foreach_add_(list(total.values()), gradients)


def zeros(parameters: Mapping[str, nn.Parameter]) -> Direction:
    """Return the direction 0."""
    shapes = {name: shape(p) for name, p in parameters.items()}
    sizes = [size.numel() for size in shapes.values()]
    parts = next(iter(parameters.values())).new_zeros(sum(sizes)).split(sizes)
    return {name: part.view(size) for (name, size), part in zip(shapes.items(), parts, strict=True)}


@torch.no_grad()
def clip(direction: Direction, max_norm: float) -> None:
    """Scale a direction down, in place, to a norm of at most ``max_norm``."""
    torch._foreach_mul_(list(direction.values()), (max_norm / (norm(direction) + 1e-6)).clamp(max=1.0))


def norm(direction: Direction) -> Tensor:
    """Return the Euclidean norm of a direction, a 0-dim tensor."""
    return torch.nn.utils.get_total_norm(direction.values())
