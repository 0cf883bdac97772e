"""Signals that ask a run to end, which it does between two updates."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from types import FrameType

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from pacmr_lightning.ranks import several_ranks


class StopSignals:
    """Remembers SIGTERM, Ctrl-C and the signal on which SLURM wants a job back, until the ranks ask.

    It takes the place of Lightning's handlers, which talk to other ranks, or save, in the middle of whatever
    the process is doing, and which it puts back when it is done. A second Ctrl-C interrupts at once, as ever.
    """

    def __init__(self, trainer: Trainer):
        self.received = 0
        environment = trainer._accelerator_connector.cluster_environment
        wanted = [signal.SIGTERM, signal.SIGINT]
        self._slurm = False
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._slurm = True
            assert environment.requeue_signal is not None  # but on Windows, which SLURM does not run on
            wanted.append(environment.requeue_signal)
        if threading.current_thread() is threading.main_thread():
            for number in wanted:
                signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def agreed(self, trainer: Trainer) -> signal.Signals | None:
        """The signal that any rank has received; all ranks ask, and get the same answer."""
        number = self.received
        if several_ranks():  # where there is nobody to ask, a step need not wait for its device
            received = torch.tensor(number, device=trainer.strategy.root_device)
            number = int(trainer.strategy.reduce(received, reduce_op="max"))
        return signal.Signals(number) if number else None

    def requeue(self, number: signal.Signals) -> None:
        """Asks SLURM to start the job again, where that is what the signal is for."""
        if not self._slurm or number in (signal.SIGTERM, signal.SIGINT):
            return
        job, task = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_ARRAY_TASK_ID")
        if task is not None:
            job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
        if subprocess.run(["scontrol", "requeue", job], check=False).returncode:
            rank_zero_warn(f"SLURM did not take job {job} back; submit it again.")
