"""One process of a group: trains the same policy under one strategy after the other.

strategy_runs.py BASE FOLDER CASE ...; torchrun's variables say which process it is. Of each case rank 0
leaves FOLDER/CASE.pt: the adapter and VNet, what was logged, the layout of pairs, and what it held.
"""

import os
import sys
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch

from pacmr_lightning.callbacks import KLGuard
from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.meta_gradient import CentralDifference, GhostDotProduct
from pacmr_lightning.meta_gradient.outer_objectives import (
    PromptAugmentationConsistency,
    SoftPromptConsistency,
)
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel, attention
from pacmr_lightning.strategies import LoraDeepSpeedStrategy
from pacmr_lightning.weighting import VNetWeighting

sys.path.append(str(Path(__file__).parent.parent / "policy"))
import looped_attention  # noqa: F401, for packed pairs on a CPU

STEPS = 4
GUARDED = 0.0069


class Watch(pl.Callback):
    """Notes coverage, what lies where after the start, and saves a checkpoint in mid-run."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint
        self.coverage = []

    def on_train_start(self, trainer, module):
        base = [p for p in module.policy.parameters() if not p.requires_grad]
        self.held = {"base_dtypes": {str(p.dtype) for p in base}}
        for name, parameters in (("base", base), ("adapter", module.policy.adapter().values())):
            self.held[f"{name}_here"] = sum(p.numel() for p in parameters)
            self.held[f"{name}_part"] = sum(p.ds_tensor.numel() for p in parameters if hasattr(p, "ds_id"))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch.meta is not None:
            self.coverage.append(float(trainer.callback_metrics["train/meta/coverage"]))
        if trainer.global_step == STEPS // 2:
            trainer.save_checkpoint(self.checkpoint)

    def on_train_end(self, trainer, module):
        optimizer = trainer.optimizers[0]
        states = getattr(optimizer, "optimizer", optimizer).state.values()
        self.held["optimizer"] = sum(v.numel() for s in states for k, v in s.items() if k != "step")


def faulty(score, rows):
    """As a kernel that is wrong where a prompt is shared."""
    found = score(rows)
    found.chosen = found.chosen + (rows.segment_ids is not None)
    return found


def strategy_of(name, options):
    if not name.startswith("zero"):
        return {"single": "auto", "ddp": "ddp"}[name]
    strategy = LoraDeepSpeedStrategy(
        stage=int(name[-1]),
        offload_optimizer="offload" in options,
        offload_parameters="offload" in options and name[-1] == "3",
    )
    # The model is small, and only in "whole" is any of it, which is all by default, whole on every rank.
    if name[-1] == "3" and "whole" not in options:
        strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return strategy


def run(base, folder, case):
    """``case``: strategy, and words that vary the run, joined by dashes."""
    name, *options = case.split("-")
    pl.seed_everything(int(os.environ["RANK"]) if name == "ddp" else 0)  # of its own, as without a seed
    attention.packs = lambda *_: "packed" in options
    few, central = (word in options for word in ("few", "central"))
    vnet = VNetWeighting(
        PromptAugmentationConsistency(tau=0.6) if few else SoftPromptConsistency(),
        CentralDifference(epsilon=0.05, relative=True) if central else GhostDotProduct(),
        every=2,
    )
    policy = PolicyModel(
        base,
        rank=4,
        dtype="bfloat16" if "bf16" in options else "float32",
        gradient_checkpointing="selective" if "selective" in options else "checkpointing" in options,
        lora_compute_dtype="base" if "half" in options else "float32",
        quantization="4bit" if "4bit" in options else None,
        logit_chunk=40,  # less than some ranks' response tokens, and not all need as many pieces
    )
    if "disagree" in options and os.environ["RANK"] == "1":
        policy.score = partial(faulty, policy.score)
    module = PreferenceModule(
        policy,
        weighting=vnet,
        learning_rate=1e-2 if few else 1e-3,
        micro_batch_size=2 if "micro" in options else None,
        micro_batch_tokens=128 if "tokens" in options else None,  # ranks need not have as many micro-batches
    )
    sizes = {"global_batch_size": 16, "validation_batch_size": 5, "meta_batch_size": 2 if few else 16}
    others = {"meta_every": 2, "noise_rate": 0.3, "max_length": 64}
    others["reference"] = "cached" if "cached" in options else "live"
    data = PreferenceDataModule(EmbeddedWorld(pairs=256, validation_pairs=9), base, **sizes, **others)
    # Between the KL after two updates and after three.
    guard = [KLGuard(pairs=4, every=1, warn=1e-6, stop=GUARDED)] if "guarded" in options else []
    watch = Watch(folder / f"{case.replace('/', '_')}.ckpt")
    resumed = [word.removeprefix("from:") for word in options if word.startswith("from:")]
    off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    validated = {"num_sanity_val_steps": 0, "val_check_interval": STEPS, "check_val_every_n_epoch": None}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy_of(name, options),
        **{"max_steps": STEPS, "max_epochs": -1, "default_root_dir": folder, "log_every_n_steps": 1},
        **{"callbacks": [watch, *guard], **dict.fromkeys(off, False), **validated},
    )
    trainer.fit(module, data, ckpt_path=folder / f"{resumed[0]}.ckpt" if resumed else None)
    state = trainer.strategy.lightning_module_state_dict()
    if trainer.is_global_zero:
        found = {
            "adapter": {k: v.cpu().clone() for k, v in state.items() if "lora_" in k},
            "vnet": module.weighting.state_dict()["vnet"],
            "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
            "updates": module.weighting.updates,
            "coverage": watch.coverage,
            "layout": policy._plan.layout,
            "held": watch.held,
        }
        torch.save(found, folder / f"{case.replace('/', '_')}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, out, *cases = sys.argv[1:]
    for each in cases:
        run(model, Path(out), each)
