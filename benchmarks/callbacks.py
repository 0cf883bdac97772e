"""Cost of the callbacks, hook by hook, in one PACMR-DPO run, and the run length from which it is under 3%.

python benchmarks/callbacks.py --model runs/quickstart/sft/model --updates 200
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections import defaultdict

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler
from rich.console import Console
from rich.table import Table

from pacmr_lightning.callbacks import (
    Health,
    RunSummary,
    SampleResponses,
    Throughput,
    VNetSurfaces,
    WeightDistributions,
    WeightGap,
    WeightRecorder,
)
from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.meta_gradient import GhostDotProduct
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.weighting import VNetWeighting

CALLBACKS = (
    WeightRecorder,
    RunSummary,
    Throughput,
    VNetSurfaces,
    WeightDistributions,
    WeightGap,
    Health,
    SampleResponses,
)
LIMIT = 0.03
STEP_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step", "on_before_zero_grad")


def main() -> None:
    """Train under Lightning's profiler and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="runs/quickstart/sft/model", help="the quickstart's SFT model")
    parser.add_argument("--updates", type=int, default=200, help="policy updates of 32 pairs")
    options = parser.parse_args()
    seed_everything(0)
    module = PreferenceModule(
        PolicyModel(options.model),
        weighting=VNetWeighting(estimator=GhostDotProduct()),
        learning_rate=5e-4,
        max_new_tokens=12,
    )
    data = PreferenceDataModule(EmbeddedWorld(), options.model, meta_every=10, noise_rate=0.3)
    with tempfile.TemporaryDirectory() as folder:
        profiler = SimpleProfiler(dirpath=folder, filename="profile")
        trainer = Trainer(
            max_steps=options.updates,
            max_epochs=-1,
            accelerator="cpu",
            devices=1,
            limit_val_batches=0,
            default_root_dir=folder,
            callbacks=[kind() for kind in CALLBACKS],
            logger=[TensorBoardLogger(folder, name="tensorboard", version=""), CSVLogger(folder, name="")],
            profiler=profiler,
            log_every_n_steps=10,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)
    durations = profiler.recorded_durations
    training = sum(durations["run_training_epoch"])
    steps: dict[str, float] = defaultdict(float)
    looks: dict[str, float] = defaultdict(float)
    for action, times in durations.items():
        if action.startswith("[Callback]"):
            name, hook = action.removeprefix("[Callback]").split("{")[0].split(".")[0], action.split(".")[-1]
            (steps if hook in STEP_HOOKS else looks)[name] += sum(times)
    update = (training - sum(steps.values())) / options.updates
    table = Table("callback", "ms an update", "share of an update (%)", "s a look", "under 3% from")
    for kind in CALLBACKS:
        name = kind.__name__
        each = steps[name] / options.updates
        # Updates over which one look and the cost per update come to 3%.
        enough = looks[name] / (LIMIT * update - each) if each < LIMIT * update else math.inf
        table.add_row(
            name,
            f"{1000 * each:.2f}",
            f"{100 * each / update:.2f}",
            f"{looks[name]:.2f}",
            f"{math.ceil(enough)} updates" if math.isfinite(enough) else "never",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{options.updates} updates took {training:.1f} s, {1000 * training / options.updates:.0f} ms each."
    )


if __name__ == "__main__":
    main()
