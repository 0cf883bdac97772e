"""The policy at shifted LoRA parameters (the virtual step), without writing to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..batch import PairBatch
from ..errors import UserError
from ..gradient import Direction
from ..policy import PolicyModel
from ..policy.mixed_precision_lora import HalfLinear

STEPS = 0.02, 0.1
"""Steps of a check: in bfloat16 a deep base may round as much of a log-probability as the first one moves."""
MISSED = 0.1
"""Largest relative error of a check."""


def _add(weight: Tensor, scale: float, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    # In fp32: bf16 autocast would round a small shift away.
    with torch.autocast(output.device.type, enabled=False):
        # One pass over the output, which is much wider than LoRA's matrix.
        x, y = inputs[0].to(weight.dtype), output.to(weight.dtype)
        return torch.addmm(y.flatten(0, -2), x.flatten(0, -2), (scale * weight).T).view(y.shape)


@contextmanager
def shifted(policy: PolicyModel, direction: Direction, scale: float) -> Iterator[None]:
    """Run the policy at omega + scale D inside; the parameters' own memory is not written.

    Gradients are those at the shifted point. With activation checkpointing backward must run inside too. The
    reference is not shifted: its adapter is off. Where parameters are whole and LoRA computes in fp32,
    a moved copy of the adapter stands in for it (4 bytes per parameter) on an fp32 base and under compile,
    where hooks would disable compiled layers. All else takes hooks, or has the shift beside the weights: bf16
    would round a small one away.

    Args:
        policy: its adapter's ``data`` are other tensors inside, and the same ones as before afterwards.
        direction: D, a full-size tensor for each adapter parameter, the same on every rank.
        scale: length of the step along D.

    Raises:
        UserError: the adapter has layers that a shift would miss.
    """
    policy.check_hooked()
    in_fp32 = (policy.compiles and policy.lora_compute_dtype == "float32") or policy.dtype == torch.float32
    way = swapped if in_fp32 and not policy.is_sharded else hooked
    with way(policy, direction, scale):
        yield


@contextmanager
def swapped(policy: PolicyModel, direction: Direction, scale: float) -> Iterator[None]:
    """``shifted`` by other data in the adapter's parameters, of which compiled code needs no new graph."""
    parameters = policy.adapter()
    before = [parameter.data for parameter in parameters.values()]
    moved = torch._foreach_add(before, [direction[name] for name in parameters], alpha=scale)
    try:
        for parameter, data in zip(parameters.values(), moved, strict=True):
            parameter.data = data
        yield
    finally:
        for parameter, data in zip(parameters.values(), before, strict=True):
            parameter.data = data


@contextmanager
def hooked(policy: PolicyModel, direction: Direction, scale: float) -> Iterator[None]:
    """``shifted`` by hooks that add scale D x to the output W x of a LoRA linear, or by its ``shift``."""
    handles, before = [], {}
    try:
        for name, linear in policy.lora_linears().items():
            if isinstance(linear, HalfLinear):
                before[linear] = linear.shift
                moved = scale * direction[name]
                linear.shift = moved if linear.shift is None else linear.shift + moved
            else:
                handles.append(linear.register_forward_hook(partial(_add, direction[name], scale)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for half, shift in before.items():
            half.shift = shift


@torch.no_grad()
def check_shifted(policy: PolicyModel, pair: PairBatch) -> None:
    """Compare hooks on LoRA's linears with moved parameters; not under ZeRO-3.

    Single pairs' gradients work by such hooks, and so may the virtual step.

    Raises:
        UserError: hooks miss a layer's effect.
    """
    policy.check_hooked()
    if policy.is_sharded:
        return
    generator = torch.Generator().manual_seed(0)
    direction = {
        name: torch.randn(w.shape, generator=generator).to(w) for name, w in policy.adapter().items()
    }

    def chosen() -> Tensor:
        with policy.lora_in_float32():  # or moved weights would be rounded, which shifted ones are not
            return policy.log_probs_in("plain", pair).chosen

    start = chosen()
    for step in STEPS:
        with hooked(policy, direction, step):
            by_hooks = chosen()
        with swapped(policy, direction, step):
            moved = chosen()
        moves, error = float((moved - start).abs().max()), float((moved - by_hooks).abs().max())
        if error <= MISSED * moves:
            return
    raise UserError(
        f"{type(policy.model).__name__} with target_modules {policy.lora['target_modules']} has LoRA "
        f"layers that the virtual step misses (moved parameters change a log-probability by {moves:.2g} "
        f"nats, and the virtual step's is {error:.2g} off); target the linear layers of attention alone."
    )
