"""torch.compile for a policy's layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError

RECOMPILATIONS = 64
"""Limit per function. FlexAttention needs 8 to 16; past torch's limit of 8 it silently runs slowly."""


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each of the model's layers; layers share compiled code.

    Compiled modules skip hooks added later (``torch._dynamo.config.skip_nnmodule_hook_guards``), which single
    pairs' gradients need; so layers with hooks run uncompiled, as does generation. Adapter, gradients and
    each number of rows and tokens that torch does not take as dynamic have a graph of their own; the virtual
    step swaps the parameters' data and needs none, or in bf16 has shifts and one more.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no layers that can be compiled; set compile to false.")
    allow_recompilations()
    for layer in layers:
        layer.forward = partial(_forward, list(layer.modules()), layer.forward, torch.compile(layer.forward))


def allow_recompilations() -> None:
    """Raise torch's limit on recompilations."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)


def _forward(
    modules: list[nn.Module],
    plain: Callable[..., Any],
    compiled: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    generation = any(isinstance(value, Cache) for value in kwargs.values())
    return (plain if hooked or generation else compiled)(*args, **kwargs)
