"""Runs the policy as if its LoRA parameters were moved along a direction, without writing to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..gradient import Direction
from ..policy import PolicyModel


def _add(weight: Tensor, scale: float, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    # In fp32 also under bf16 autocast, which would round a small shift away.
    with torch.autocast(output.device.type, enabled=False):
        # One pass over the output, which is much wider than LoRA's matrix: no product of its own, scaled and
        # added, is written.
        x, y = inputs[0].to(weight.dtype), output.to(weight.dtype)
        return torch.addmm(y.flatten(0, -2), x.flatten(0, -2), (scale * weight).T).view(y.shape)


@contextmanager
def shifted(policy: PolicyModel, direction: Direction, scale: float) -> Iterator[None]:
    """Inside, every LoRA linear W x gives (W + scale D) x; the parameters themselves stay as they are.

    Gradients taken inside are those at the shifted point, with respect to the unshifted parameters. Backward
    has to run inside too where activations are checkpointed, since it repeats the forward. Nothing is left
    behind when the body raises. The reference does not see the shift: its adapter is off.

    Args:
        policy: the model to shift.
        direction: D, a full-size tensor for each adapter parameter, the same on every rank.
        scale: c.
    """
    handles = []
    try:
        for name, linear in policy.lora_linears().items():
            handles.append(linear.register_forward_hook(partial(_add, direction[name], scale)))
        yield
    finally:
        for handle in handles:
            handle.remove()
