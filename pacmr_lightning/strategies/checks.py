"""Which strategies train an adapter as it should be, and that it stays in fp32 under them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from ..errors import UserError
from .deepspeed import LoraDeepSpeedStrategy

FULL = (torch.float32, torch.float64)
"""Precisions in which small updates are not rounded away."""


def check_strategy(strategy: Strategy, quantization: str | None = None) -> None:
    """Refuse strategies under which the method's steps would go wrong.

    Args:
        strategy: the trainer's.
        quantization: the policy's.

    Raises:
        UserError: the strategy cuts parameters into pieces that only it knows, or casts the adapter; its
            precision is not one; or it cannot hold a quantised base.
    """
    if (precision := strategy.precision_plugin.precision) not in ("32-true", "64-true"):
        # Autocast would be at work in some passes of an update and not in others: hooks take products of
        # gradients outside of it, and the reference on disk is computed before it begins.
        raise UserError(
            f"trainer.precision is {precision}, under which an adapter is not trained as it should be; leave "
            "it at 32-true, and for half precision set the policy's dtype, the base's, to bfloat16."
        )
    lora = isinstance(strategy, LoraDeepSpeedStrategy)
    plain = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
    if not lora and (not plain or isinstance(strategy, DeepSpeedStrategy)):
        raise UserError(
            f"trainer.strategy is {type(strategy).__name__}, with which an adapter is not trained as it "
            "should be; use auto, ddp, or configs/strategies/zero1.yaml, zero2.yaml or zero3.yaml for "
            "DeepSpeed."
        )
    if quantization and lora:
        # Stage 3 would cut packed weights apart from their scales, of which it knows nothing; at 1 and 2
        # an adapter saves nothing that counts, and nobody has looked whether the engine keeps 4 bits.
        raise UserError(
            f"quantization is {quantization}, with which no stage of DeepSpeed (ZeRO-1, 2, 3) is used; "
            "set trainer.strategy to auto or ddp, or quantization to null."
        )


def check_adapter(parameters: Mapping[str, nn.Parameter]) -> None:
    """Look at the trained parameters, by name, before the first step.

    Raises:
        UserError: the trainer's precision has turned them into half precision.
    """
    for name, parameter in parameters.items():
        if parameter.dtype not in FULL:
            raise UserError(
                f"The adapter's {name} is {parameter.dtype}, which rounds small updates away; leave "
                "trainer.precision at 32-true and set the policy's dtype, the base's, to bfloat16."
            )


def check_precision(
    optimizer: Any, parameters: Mapping[str, nn.Parameter], gradient: Mapping[str, Tensor]
) -> None:
    """Assert that the adapter, its gradient and the optimizer's state are in fp32, under any base.

    Args:
        optimizer: the trainer's, after its first step.
        parameters: the trained parameters by name.
        gradient: their gradient by name.
    """
    # DeepSpeed's wraps torch's.
    base = getattr(optimizer.optimizer, "optimizer", optimizer.optimizer)
    states = {
        f"the optimizer's {key}": value
        for state in base.state.values()
        for key, value in state.items()
        if torch.is_tensor(value)
    }
    for name, tensor in {**parameters, **gradient, **states}.items():
        assert tensor.dtype in FULL, f"{name} is {tensor.dtype}, not fp32"
