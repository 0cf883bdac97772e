"""torch.compile for a policy's layers, which does not lose the hooks that the method puts on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError

RECOMPILATIONS = 64
"""Of one function. FlexAttention needs 8 for one row or more, one block or more, with and without gradient,
and 16 where two kinds of layers have masks of their own; past torch's limit of 8 it is slow in silence."""


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles each of the model's layers; they share the code, so that one is compiled for all.

    A compiled module silently skips hooks that come after its compilation
    (``torch._dynamo.config.skip_nnmodule_hook_guards``), and VNet's update works through such hooks; with
    guards on them, every update would compile anew. So a layer with a hook inside runs as it is, and so does
    generation, which grows by one token at a time.

    Raises:
        UserError: the model has no layers that transformers knows.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no layers that can be compiled; set compile to false.")
    allow_recompilations()
    for layer in layers:
        layer.forward = partial(_forward, list(layer.modules()), layer.forward, torch.compile(layer.forward))


def allow_recompilations() -> None:
    """Lets one function be compiled for all the shapes of a run."""
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
