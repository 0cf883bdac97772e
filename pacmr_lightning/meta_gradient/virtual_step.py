"""The policy with its LoRA parameters moved along a direction, without writing to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..batch import PairBatch
from ..errors import UserError
from ..gradient import Direction
from ..policy import PolicyModel
from ..policy.mixed_precision_lora import HalfLinear, add_shift

STEP = 0.02
MISSED = 0.1
"""Largest relative error of a check; rounding in bfloat16 stays below it."""


def _add(weight: Tensor, scale: float, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    # In fp32: bf16 autocast would round a small shift away.
    with torch.autocast(output.device.type, enabled=False):
        # One pass over the output, which is much wider than LoRA's matrix.
        x, y = inputs[0].to(weight.dtype), output.to(weight.dtype)
        return torch.addmm(y.flatten(0, -2), x.flatten(0, -2), (scale * weight).T).view(y.shape)


@contextmanager
def shifted(policy: PolicyModel, direction: Direction, scale: float) -> Iterator[None]:
    """Inside, every LoRA linear W x gives (W + scale D) x; the parameters themselves stay as they are.

    Gradients are those at the shifted point. With activation checkpointing backward must run inside too. The
    reference is not shifted: its adapter is off. ``direction`` is D, a full-size tensor for each adapter
    parameter, the same on every rank.

    Raises:
        UserError: the adapter has layers that a shift would miss.
    """
    policy.check_hooked()
    handles = []
    try:
        for name, linear in policy.lora_linears().items():
            if isinstance(linear, HalfLinear):
                handles.append(add_shift(linear, direction[name], scale))
            else:
                handles.append(linear.register_forward_hook(partial(_add, direction[name], scale)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def check_shifted(policy: PolicyModel, pair: PairBatch) -> None:
    """Compare ``shifted`` with moved parameters, and refuse layers it misses; ZeRO-3 is not checked."""
    policy.check_hooked()
    if policy.is_sharded:
        return
    generator = torch.Generator().manual_seed(0)
    adapter = policy.adapter()
    direction = {name: torch.randn(w.shape, generator=generator).to(w) for name, w in adapter.items()}
    before = {name: w.clone() for name, w in adapter.items()}

    def chosen() -> Tensor:
        with policy.lora_in_float32():  # or moved weights would be rounded, which shifted ones are not
            return policy.log_probs_in("plain", pair).chosen

    start = chosen()
    with shifted(policy, direction, STEP):
        by_hooks = chosen()
    try:
        for name, w in adapter.items():
            w.add_(direction[name], alpha=STEP)
        moved = chosen()
    finally:
        for name, w in adapter.items():
            w.copy_(before[name])
    moves, error = float((moved - start).abs().max()), float((moved - by_hooks).abs().max())
    if error > MISSED * moves:
        raise UserError(
            f"{type(policy.model).__name__} with target_modules {policy.lora['target_modules']} has LoRA "
            f"layers that the virtual step misses (moved parameters change a log-probability by {moves:.2g} "
            f"nats, and the virtual step's is {error:.2g} off); target the linear layers of attention alone."
        )
