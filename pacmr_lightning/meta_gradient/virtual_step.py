"""The policy at shifted LoRA parameters (the virtual step), without writing to them."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..policy import PolicyModel
from .gradient import Direction


@contextmanager
def shifted(policy: PolicyModel, direction: Direction, scale: float) -> Iterator[None]:
    """Run the policy at omega + scale D inside; the parameters are not written.

    Gradients are those at the shifted point. With activation checkpointing backward must run inside too. The
    reference is not shifted: its adapter is off.

    Args:
        policy: its layers have a ``shift`` inside, and none afterwards.
        direction: D, a full-size tensor for each adapter parameter, the same on every rank.
        scale: length of the step along D.

    Raises:
        UnsupportedLoraError: the adapter has layers on the experts of a mixture.
    """
    layers = policy.lora_layers()
    assert not any(layer.shift for layer in layers.values()), "a shift inside a shift"
    try:
        for (a, b), layer in layers.items():
            layer.shift = scale * direction[a], scale * direction[b]
        yield
    finally:
        for layer in layers.values():
            layer.shift = None
