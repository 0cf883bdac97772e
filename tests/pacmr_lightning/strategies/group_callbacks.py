"""What the tests of groups of processes put into a run's ``trainer.callbacks``, by import path."""

import os
import signal

import torch
from lightning.pytorch import Callback

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.strategies.sharding import is_sharded


class Poison(Callback):
    """Makes one pair's loss NaN, on one process, at one update."""

    def __init__(self, rank: int = 1, step: int = 2):
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.step:  # on all of them, which take the same number of forward passes
            values = torch.zeros(len(batch.train))
            values[0] = torch.nan if trainer.global_rank == self.rank else 0.0
            batch.train = batch.train.with_reference(LogProbs(values, torch.zeros_like(values)))


class Killed(Callback):
    """Kills one process of the group after an update, as the kernel does where memory runs out."""

    def __init__(self, rank: int = 1, step: int = 2):
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == self.rank and batch_idx == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Sizes(Callback):
    """Writes down the bytes that this process holds of the policy and its optimizer."""

    def on_train_end(self, trainer, pl_module):
        def size(tensors):
            return sum(t.numel() * t.element_size() for t in tensors)

        def held(parameters):
            return size(p.ds_tensor if is_sharded(p) else p for p in parameters)

        parameters = list(pl_module.policy.parameters())
        optimizer = trainer.optimizers[0]
        states = getattr(optimizer, "optimizer", optimizer).state.values()
        found = {
            "base": held(p for p in parameters if not p.requires_grad),
            "adapter": held(p for p in parameters if p.requires_grad),
            "optimizer": size(v for s in states for k, v in s.items() if k != "step"),
        }
        torch.save(found, f"{trainer.default_root_dir}/sizes-{trainer.global_rank}.pt")
