"""AdamW's state in DeepSpeed's engine, of which each rank has a part: whole, and cut into parts again.

The engine's AdamW does not step the parameters but flat fp32 copies of this rank's parts of them, which at
stages 1 and 2 DeepSpeed maps to the parameters and back, and at stage 3 this file does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .sharding import is_sharded

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state beside its step."""


def whole_state(optimizer: Any, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """AdamW's ``state_dict`` as a single process has it, on the CPU; all ranks call it together.

    Args:
        optimizer: DeepSpeed's.
        parameters: the trained ones, in the order of the ``state_dict``.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    base = optimizer.optimizer
    groups = [{**group, "params": list(range(len(parameters)))} for group in base.param_groups]
    steps = [base.state[flat]["step"] for flat in _flat_parameters(optimizer) if base.state[flat]]
    if not steps:
        return {"state": {}, "param_groups": groups}
    state = {
        i: {
            "step": steps[0].detach().cpu().clone(),
            **{key: safe_get_full_optimizer_state(p, key).cpu() for key in MOMENTS},
        }
        for i, p in enumerate(parameters)
    }
    return {"state": state, "param_groups": groups}


def load_whole_state(optimizer: Any, parameters: Sequence[nn.Parameter], saved: dict[str, Any]) -> None:
    """Takes this rank's part of what ``whole_state`` returned, or another strategy's AdamW.

    Args:
        optimizer: DeepSpeed's.
        parameters: the trained ones, in the order of the ``state_dict``.
        saved: the ``state_dict``.
    """
    base = optimizer.optimizer
    for group, kept in zip(base.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in kept.items() if key != "params"})
    if not saved["state"]:
        return
    for flat in _flat_parameters(optimizer):
        zeros = {key: torch.zeros_like(flat) for key in MOMENTS}
        base.state[flat] = {"step": saved["state"][0]["step"].clone(), **zeros}
    if not any(map(is_sharded, parameters)):
        optimizer._lazy_init_hp_params_optimizer_state()
    for i, p in enumerate(parameters):
        for key in MOMENTS:
            set_part(optimizer, p, saved["state"][i][key], key)


def set_part(optimizer: Any, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
    """Writes this rank's part of a whole tensor: of AdamW's state ``key``, or of its fp32 copy."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    value = value.to(parameter.device)
    if not is_sharded(parameter):
        if key is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)
        return
    # DeepSpeed's own setter wants a size that the ranks divide; the last part is padded where they do not.
    part, _ = optimizer._get_fp32_opt_state_partition(parameter, True, key)
    padded = value.new_zeros(part.numel() * torch.distributed.get_world_size())
    padded[: value.numel()] = value.flatten()
    part.data.copy_(padded[part.numel() * torch.distributed.get_rank() :][: part.numel()])


def _flat_parameters(optimizer: Any) -> list[Tensor]:
    """This rank's fp32 parts of the trained parameters, which the engine's AdamW steps."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return optimizer.fp32_partitioned_groups_flat
    return optimizer.single_partition_of_fp32_groups
