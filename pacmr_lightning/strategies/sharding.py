"""Reading and writing parameters that DeepSpeed's ZeRO-3 keeps in parts, one on each rank."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import nn


def is_sharded(parameter: nn.Parameter) -> TypeGuard[Any]:
    """Whether this rank holds a part of the parameter only, which then has DeepSpeed's own attributes."""
    return hasattr(parameter, "ds_id")


def whole(parameters: Iterable[nn.Parameter], change: bool = False) -> AbstractContextManager[None]:
    """Inside, the parameters are whole; all ranks enter together. Does nothing without ZeRO-3.

    Args:
        parameters: those to gather, the others stay as they are.
        change: what rank 0 has at the end is cut into the parts again; else changes are lost.
    """
    sharded = [p for p in parameters if is_sharded(p)]
    if not sharded:
        return nullcontext()
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if not change:  # small ones may be whole already, and in use
        sharded = [p for p in sharded if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if change else None)


def shape(parameter: nn.Parameter) -> torch.Size:
    """The whole parameter's shape."""
    return torch.Size(parameter.ds_shape) if is_sharded(parameter) else parameter.shape
