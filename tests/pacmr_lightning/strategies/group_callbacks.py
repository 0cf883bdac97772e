"""What ends one process of a group, for a run's ``trainer.callbacks``, by import path."""

import os
import signal

import torch
from lightning.pytorch import Callback

from pacmr_lightning.batch import LogProbs

RANK, STEP = 1, 2


class Poison(Callback):
    """Makes one pair's loss NaN, on one process, at one update."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == STEP:  # on all of them, which take the same number of forward passes
            values = torch.zeros(len(batch.train))
            values[0] = torch.nan if trainer.global_rank == RANK else 0.0
            batch.train = batch.train.with_reference(LogProbs(values, torch.zeros_like(values)))


class Killed(Callback):
    """Kills one process of the group after an update, as the kernel does where memory runs out."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.global_rank, batch_idx) == (RANK, STEP):
            os.kill(os.getpid(), signal.SIGKILL)
