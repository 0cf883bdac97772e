"""What Health reads of a module: the values of a VNet update, and adapters that do not learn."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from pacmr_lightning.gradient import sum_over_ranks

OUTER = ("meta/d_norm", "meta/coverage", "meta/pseudo_labels_as_observed")
"""Values of a VNet update that Health looks at."""


def outer_values(trainer: Trainer, pl_module: LightningModule) -> dict[str, Tensor]:
    """What the VNet update of the step that has just ended reported over all ranks, 0-dim each."""
    # The module hands the values to the loggers, and forgets them, where the step itself is logged.
    logged = {name.removeprefix("train/"): value for name, value in trainer.callback_metrics.items()}
    values = pl_module.outer_values or logged
    return {name: values[name].detach() for name in OUTER if name in values}


def dead_adapters(pl_module: LightningModule) -> tuple[list[str], int]:
    """Names of the LoRA layers' B that are 0 everywhere, and how many B there are. All ranks must call it."""
    adapter = pl_module.policy.adapter()
    names = [name for name in adapter if ".lora_B." in name]
    alive = torch.stack([adapter[name].detach().ne(0).any().double() for name in names])
    sum_over_ranks([alive])  # a rank may hold no part of a sharded parameter
    return [name for name, count in zip(names, alive.tolist(), strict=True) if not count], len(names)
