"""What Health reads of a module: the values of a VNet update, and adapters that do not learn."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.strategies.sharding import whole

OUTER = ("meta/d_norm", "meta/coverage", "meta/pseudo_labels_as_observed")
"""Values of a VNet update that Health looks at."""


def outer_values(trainer: Trainer, pl_module: PreferenceModule) -> dict[str, Tensor]:
    """What the VNet update of the step that has just ended reported over all ranks, 0-dim each."""
    # The module hands the values to the loggers, and forgets them, where the step itself is logged.
    logged = {name.removeprefix("train/"): value for name, value in trainer.callback_metrics.items()}
    values = pl_module.outer_values or logged
    return {name: values[name].detach() for name in OUTER if name in values}


def dead_adapters(pl_module: PreferenceModule) -> tuple[list[str], int]:
    """Names of the LoRA layers' B that are 0 everywhere, and how many B there are. All ranks must call it."""
    adapter = pl_module.policy.adapter()
    names = [name for name in adapter if ".lora_B." in name]
    with whole(adapter[name] for name in names):
        alive = torch.stack([adapter[name].detach().ne(0).any() for name in names])
    return [name for name, moved in zip(names, alive.tolist(), strict=True) if not moved], len(names)
