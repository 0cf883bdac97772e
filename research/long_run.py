"""Memory over a long run of PACMR-DPO with all callbacks, loggers, validation and checkpoints.

    python -m research.long_run --model runs/quickstart/sft/model --updates 2000

trains in the synthetic benchmark, and prints every 100 updates the process's resident memory, the part in use
by glibc's account (resident memory also holds what was freed, and jumps about), and the most that a GPU had
allocated; then the slope of a straight line through the second half, by which windows are full.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
import warnings
from typing import Any, Literal

import numpy as np
import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from pacmr_lightning.callbacks import (
    GoldReward,
    Health,
    NoiseMask,
    RunCheckpoint,
    RunSummary,
    SampleResponses,
    Snapshots,
    Throughput,
    VNetSurfaces,
    WeightDistributions,
    WeightGap,
    WeightRecorder,
)
from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import CentralDifference
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.runs.loggers import ContinuedCSVLogger
from pacmr_lightning.weighting import VNetWeighting

from . import command

MIB = 2**20
FLAT = 5.0
"""MiB per 1,000 updates under which memory counts as flat: 15 MiB in the 2,901 updates of Qu et al.."""


class Mallinfo2(ctypes.Structure):
    """glibc's account of the heap, in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    )


def in_use() -> float:
    """MiB that the process has allocated and not freed; NaN without glibc."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return float("nan")
    ask.restype = Mallinfo2
    found = ask()
    return (found.uordblks + found.hblkhd) / MIB


class Memory(Callback):
    """Samples the process's memory between updates."""

    def __init__(self, every: int):
        self.every = every
        self.rows: list[tuple[int, float, float, float]] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Adds a row: updates, resident MiB, those in use, and a GPU's peak since the last row in MiB."""
        if trainer.global_step % self.every:
            return
        gc.collect()  # what waits for the collector is no leak
        gpu = 0.0
        if torch.cuda.is_available():
            gpu = torch.cuda.max_memory_allocated() / MIB
            torch.cuda.reset_peak_memory_stats()
        resident = psutil.Process().memory_info().rss / MIB
        self.rows.append((trainer.global_step, resident, in_use(), gpu))


def long_run(
    model: str = "runs/quickstart/sft/model",
    updates: int = 2000,
    batch: int = 16,
    estimator: Literal["ghost", "central"] = "ghost",
) -> None:
    """Train PACMR-DPO with all callbacks, and print the process's memory every 100 updates and its slope.

    Args:
        model: the quickstart's SFT model.
        updates: policy updates.
        batch: pairs of an update.
        estimator: of the meta-gradient.
    """
    if updates < 400:
        raise UserError(f"updates is {updates}, but a slope needs at least 400.")
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
    seed_everything(0)
    given = {"estimator": CentralDifference()} if estimator == "central" else {}
    module = PreferenceModule(
        PolicyModel(model),
        weighting=VNetWeighting(**given),
        method="pacmr",
        learning_rate=5e-4,
        max_new_tokens=12,
    )
    world = EmbeddedWorld(pairs=6400, validation_pairs=128)
    data = PreferenceDataModule(
        world, model, meta_every=10, noise_rate=0.3, max_length=64, global_batch_size=batch
    )
    memory = Memory(every=100)
    with tempfile.TemporaryDirectory() as folder:
        every = max(updates // 10, 1)
        trainer = Trainer(
            max_steps=updates,
            max_epochs=-1,
            accelerator="auto",
            devices=1,
            val_check_interval=every,
            check_val_every_n_epoch=None,
            default_root_dir=folder,
            callbacks=[
                memory,
                NoiseMask(),
                WeightRecorder(),
                RunSummary(),
                Throughput(),
                VNetSurfaces(steps=[every, 5 * every]),
                WeightDistributions(steps=[every, 5 * every]),
                WeightGap(every=every, probe_pairs=500),
                Health(),
                SampleResponses(every=every),
                Snapshots(steps=[every]),
                GoldReward(samples=64, max_new_tokens=12),
                RunCheckpoint(f"{folder}/checkpoints", save_last=True, every_n_train_steps=every),
            ],
            logger=[
                TensorBoardLogger(folder, name="tensorboard", version=""),
                ContinuedCSVLogger(folder, ""),
            ],
            log_every_n_steps=10,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)
    rows = np.array(memory.rows)
    table = Table("updates", "resident MiB", "in use MiB", "GPU MiB")
    for step, *values in memory.rows:
        table.add_row(f"{step:,}", *(f"{value:,.1f}" for value in values))
    Console().print(table)
    late = rows[rows[:, 0] >= updates / 2]
    for name, column in (("resident", 1), ("in use", 2), ("GPU", 3)):
        slope = 1000 * float(np.polyfit(late[:, 0], late[:, column], 1)[0])
        # What is freed and kept moves resident memory by more than a slow leak would.
        verdict = "" if name == "resident" else ": flat" if slope < FLAT else ": NOT flat"
        print(f"{name}: {slope:+.2f} MiB per 1,000 updates from {int(late[0, 0]):,} on{verdict}")


main = command("long_run", long_run)

if __name__ == "__main__":
    main()
