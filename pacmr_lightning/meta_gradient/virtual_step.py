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
        policy: its layers have another ``shift`` inside, and the same one as before afterwards.
        direction: D, a full-size tensor for each adapter parameter, the same on every rank.
        scale: length of the step along D.

    Raises:
        UnsupportedLoraError: the adapter has layers on the experts of a mixture.
    """
    layers = policy.lora_layers()
    before = [layer.shift for layer in layers.values()]
    try:
        for (a, b), layer in layers.items():
            da, db = scale * direction[a], scale * direction[b]
            layer.shift = (da, db) if layer.shift is None else (layer.shift[0] + da, layer.shift[1] + db)
        yield
    finally:
        for layer, shift in zip(layers.values(), before, strict=True):
            layer.shift = shift
