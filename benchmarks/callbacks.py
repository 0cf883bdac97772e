"""Cost of the callbacks, hook by hook, in one PACMR-DPO run.

    python benchmarks/callbacks.py --model runs/quickstart/sft/model --updates 200

It prints, in CPU time, each one's median per update, its total during training, and before and after; and the
share of the training that regular pictures and texts take.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from statistics import median

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler
from rich.console import Console
from rich.table import Table

from pacmr_lightning.callbacks import (
    Dashboard,
    Health,
    RunSummary,
    SampleResponses,
    SuspectedPairs,
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


class CpuProfiler(SimpleProfiler):
    """Lightning's profiler with CPU time, which other work on the machine does not inflate."""

    def start(self, action_name: str) -> None:
        """Start the clock of an action."""
        self.current_actions[action_name] = time.process_time()

    def stop(self, action_name: str) -> None:
        """Stop the clock of an action."""
        started = self.current_actions.pop(action_name)
        self.recorded_durations[action_name].append(time.process_time() - started)


CALLBACKS = (
    WeightRecorder,
    RunSummary,
    Throughput,
    VNetSurfaces,
    WeightDistributions,
    WeightGap,
    SuspectedPairs,
    Health,
    SampleResponses,
    Dashboard,
)
DRAWING = (VNetSurfaces, WeightDistributions, SuspectedPairs)
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
        profiler = CpuProfiler(dirpath=folder, filename="profile")
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
    steps: dict[str, list[float]] = defaultdict(list)
    ends: dict[str, float] = defaultdict(float)
    for action, times in durations.items():
        if action.startswith("[Callback]"):
            name, hook = action.removeprefix("[Callback]").split("{")[0].split(".")[0], action.split(".")[-1]
            if hook == "on_train_batch_end":
                steps[name] = times
            elif hook not in STEP_HOOKS:
                ends[name] += sum(times)
    columns = ("ms per update", "s in training", "% of training", "s before and after")
    table = Table("callback", *columns)
    for kind in CALLBACKS:
        name = kind.__name__
        table.add_row(
            name,
            f"{1000 * median(steps[name]):.2f}",
            f"{sum(steps[name]):.2f}",
            f"{100 * sum(steps[name]) / training:.2f}",
            f"{ends[name]:.2f}",
        )
    console = Console(width=100)
    console.print(table)
    console.print(
        f"{options.updates} updates took {training:.1f} s of CPU, "
        f"{1000 * training / options.updates:.0f} ms each."
    )
    times = [steps[kind.__name__] for kind in DRAWING]
    drawing = sum(sum(each) - len(each) * median(each) for each in times)
    # The first picture loads matplotlib and draws the frames of all later ones.
    first = sum(max(each) - median(each) for each in times)
    console.print(
        f"Pictures and texts: {drawing:.2f} s, {100 * drawing / training:.1f}% of the training; the first of "
        f"each {first:.2f} s, the others {drawing - first:.2f} s."
    )


if __name__ == "__main__":
    main()
