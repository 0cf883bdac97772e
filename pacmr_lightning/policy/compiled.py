"""torch.compile for a policy's layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError
from .lora_layer import PolicyLora

RECOMPILATIONS = 64
"""Limit per function; past it torch silently runs slowly."""


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each of the model's layers; layers share compiled code.

    Single pairs' gradients are handed to Python, so layers that take them run uncompiled, as does generation.
    Adapter, shift, gradients and each number of rows and tokens that torch does not take as dynamic have a
    graph of their own.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no layers that can be compiled; set compile to false.")
    torch._dynamo.config.specialize_float = True  # LoRA's scaling as a number, not as an input
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    for layer in layers:
        own = [module for module in layer.modules() if isinstance(module, PolicyLora)]
        layer.forward = partial(_forward, own, layer.forward, torch.compile(layer.forward, dynamic=True))


def _forward(
    layers: list[PolicyLora],
    plain: Callable[..., Any],
    compiled: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    per_pair = any(layer.per_pair is not None for layer in layers)
    generation = any(isinstance(value, Cache) for value in kwargs.values())
    return (plain if per_pair or generation else compiled)(*args, **kwargs)
