"""A run's configuration: what "auto" means on its machine, and the file that it leaves in its folder."""

from __future__ import annotations

from pathlib import Path

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info

from ..files import replacing
from ..numerics import base_dtype, recomputes
from .folder import CHECKPOINTS, CONFIG


class SaveRunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's folder once training starts, so bad input leaves nothing."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file on rank zero."""
        if trainer.is_global_zero:
            config = self.config.clone()
            root = Path(config.trainer.default_root_dir)
            # What is done when it ends is no part of the run, and the second pass has this file, too.
            config.pop("refine", None)
            config.ckpt_path = None  # where this fit goes on from is not the run's configuration
            if config.checkpoint.dirpath == str(root / CHECKPOINTS):  # a run of it elsewhere has its own
                config.checkpoint.dirpath = None
            text = self.parser.dump(config, skip_none=False)
            with replacing(root / CONFIG) as temporary:
                temporary.write_text(text)


def resolve_auto(config: Namespace) -> None:
    """Writes what "auto" means here into the configuration, since other machines will read the run."""
    options = config.model.get("init_args") or Namespace()
    lora = options.get("policy") or options.get("lora")
    options = (options.get("policy") or Namespace()).get("init_args") or options
    gpu = config.trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    chosen: dict[str, str | bool] = {}
    if options.get("dtype") == "auto":
        chosen["dtype"] = str(base_dtype("auto", gpu and bool(lora))).removeprefix("torch.")
    if options.get("gradient_checkpointing") == "auto":
        chosen["gradient_checkpointing"] = recomputes("auto", gpu)
    for name, value in chosen.items():
        options[name] = value
    if chosen:
        named = " and ".join(f"{name} {str(value).lower()}" for name, value in chosen.items())
        rank_zero_info(f"auto is {named}, {'on a GPU' if gpu else 'without a GPU'}.")
