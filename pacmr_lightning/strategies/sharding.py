"""Access to parameters sharded by DeepSpeed's ZeRO-3."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import nn


def is_sharded(parameter: nn.Parameter) -> TypeGuard[Any]:
    """True if this rank holds only a part, with DeepSpeed's attributes."""
    return hasattr(parameter, "ds_id")


def whole(parameters: Iterable[nn.Parameter], change: bool = False) -> AbstractContextManager[None]:
    """Gather the parameters inside; all ranks enter together. Does nothing without ZeRO-3.

    With ``change``, rank 0's values are sharded again at the end; otherwise changes are lost.
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
