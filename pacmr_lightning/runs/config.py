"""A run's configuration: the values of "auto" on this machine, and ``config.yaml``."""

from __future__ import annotations

from pathlib import Path

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info

from ..files import replacing
from ..modules import PreferenceModule
from ..modules.datamodule import datamodule
from ..numerics import base_dtype, recomputes
from .folder import CHECKPOINTS, CONFIG
from .memory_estimate import GIB, step_bytes

FREE = 0.9
"""Share of a GPU's free memory that a step's estimate may take; the rest is for what is not counted."""


class SaveRunConfig(SaveConfigCallback):
    """Write ``config.yaml`` into the run's folder when training starts, so bad input leaves nothing."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Resolve ``gradient_checkpointing: auto`` by memory on a GPU, now that lengths are known."""
        device = trainer.strategy.root_device
        if stage != "fit" or not isinstance(pl_module, PreferenceModule) or device.type != "cuda":
            return
        options = _policy_options(self.config)
        if options.get("gradient_checkpointing") != "auto":
            return
        policy, data = pl_module.policy, datamodule(trainer)
        # Not estimated: DeepSpeed's shards, and attention that keeps its scores.
        others = {"DeepSpeed": isinstance(trainer.strategy, DeepSpeedStrategy)}
        others["eager attention"] = policy.attn_implementation == "eager"
        if uncounted := [name for name, there in others.items() if there]:
            options["gradient_checkpointing"] = policy.gradient_checkpointing = True
            rank_zero_info(
                f"gradient_checkpointing auto is true: a step's memory with {uncounted[0]} is not estimated."
            )
            return
        pairs = pl_module.micro_batch_size or data.global_batch_size // trainer.world_size
        prompt, response = data.train_pairs.longest()
        needed = step_bytes(policy, pairs, prompt, response, trainer.world_size)
        free, _ = torch.cuda.mem_get_info(device)
        policy.gradient_checkpointing = options["gradient_checkpointing"] = needed > FREE * free
        rank_zero_info(
            f"gradient_checkpointing auto is {str(policy.gradient_checkpointing).lower()}: without it a step "
            f"takes some {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB of the GPU are free."
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file on rank 0."""
        if trainer.is_global_zero:
            config = self.config.clone()
            root = Path(config.trainer.default_root_dir)
            # Not part of the run, whose second pass has this file too.
            config.pop("refine", None)
            config.ckpt_path = None  # not part of the run
            if config.checkpoint.dirpath == str(root / CHECKPOINTS):  # a run elsewhere has its own
                config.checkpoint.dirpath = None
            text = self.parser.dump(config, skip_none=False)
            with replacing(root / CONFIG) as temporary:
                temporary.write_text(text)


def resolve_auto(config: Namespace) -> None:
    """Replace "auto" in the configuration, since other machines will read the run."""
    model = config.model.get("init_args") or Namespace()
    policy = model.get("policy")
    options = _policy_options(config) if policy else model
    lora = policy or model.get("lora")
    gpu = config.trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    chosen: dict[str, str | bool] = {}
    if options.get("dtype") == "auto":
        chosen["dtype"] = str(base_dtype("auto", gpu and bool(lora))).removeprefix("torch.")
    if options.get("gradient_checkpointing") == "auto" and not (gpu and policy):  # else ``SaveRunConfig``
        chosen["gradient_checkpointing"] = recomputes("auto", gpu)
    for name, value in chosen.items():
        options[name] = value
    if chosen:
        named = " and ".join(f"{name} {str(value).lower()}" for name, value in chosen.items())
        rank_zero_info(f"auto is {named}, {'on a GPU' if gpu else 'without a GPU'}.")


def _policy_options(config: Namespace) -> Namespace:
    return config.model.init_args.policy.init_args
