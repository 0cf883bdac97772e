"""Runs a sweep's cells as SLURM jobs, through submitit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import ceil
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from . import runner, state, worker
from .cells import Cell
from .spec import Sweep

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from submitit.helpers import DelayedSubmission

TIMEOUTS = 20
"""Times that a job is queued again at the end of its time; preemptions do not count."""
NOTICE = 300
"""Seconds before the end of its time at which a job saves its state; at most a quarter of the time."""


@dataclass(frozen=True)
class SlurmOptions:
    """Options of ``sbatch``, beside the sweep's threads and devices.

    Args:
        time: limit of a job, h:m:s. At its end a job saves its state, is queued again and goes on.
        sbatch: other options of sbatch, such as '{"partition": "gpu", "account": "lab", "mem": "64G"}'.
    """

    time: timedelta = timedelta(hours=24)
    sbatch: dict[str, Any] = field(default_factory=dict)


def submit(
    sweep: Sweep, left: Sequence[Cell], options: SlurmOptions, jobs: int | None, cluster: str = "slurm"
) -> None:
    """Submit the cells whose predecessors are done as an array of jobs, of which ``jobs`` run at once.

    ``cluster`` is submitit's name of it.

    Raises:
        UserError: a preparation, submitit or SLURM is missing, or SLURM refuses a job.
    """
    try:
        import submitit
    except ImportError:
        raise UserError(
            "--launcher slurm needs the submitit package; install it with "
            "pip install 'pacmr-lightning[slurm]'."
        ) from None
    seconds = round(options.time.total_seconds())
    if seconds < 60:
        raise UserError(f"--slurm.time is {options.time}, but it must be at least 0:01:00.")
    output = Path(sweep.output)
    notice = min(NOTICE, seconds // 4)
    with runner.only_one(output):
        # Another command may have submitted some since.
        left = [cell for cell in left if state.state_of(cell) != "submitted"]
        for cell in left:
            if cell.after and not state.ready(cell):
                print(f"{cell.name} is not submitted: {cell.after.name} is not done")
        left = [cell for cell in left if state.ready(cell)]
        if not left:
            return
        for preparation in sweep.preparations():
            if not Path(preparation.output).exists():
                raise UserError(
                    f"{preparation.output} is missing, which the cells need; make it in a job of its own "
                    f"(pacmr {preparation.command}), and give this command again."
                )
        try:
            executor = submitit.AutoExecutor(output / "slurm", cluster, slurm_max_num_timeout=TIMEOUTS)
            executor.update_parameters(
                name=output.name,
                timeout_min=ceil(seconds / 60),
                gpus_per_node=sweep.devices or None,
                cpus_per_task=sweep.threads,
                stderr_to_stdout=True,
                slurm_signal_delay_s=notice,
                slurm_array_parallelism=jobs or len(left),
                slurm_additional_parameters={"requeue": True, **options.sbatch},
            )
            started = executor.submit_array([Job(sweep, cell, notice) for cell in left])
        except (RuntimeError, submitit.core.utils.FailedJobError) as error:
            raise UserError(f"SLURM takes no jobs here: {str(error).strip() or 'sbatch failed'}") from None
        for job, cell in zip(started, left, strict=True):
            state.submitted(cell, job.job_id)
    print(f"Submitted {len(left)} cells; the same command shows their state.")


class Job:
    """A cell's job; submitit pickles and calls it.

    At submitit's signal, and at SIGTERM, the run saves its state; a job that is queued again goes on.
    """

    def __init__(self, sweep: Sweep, cell: Cell, notice: int):
        self.sweep, self.cell, self.notice = sweep, cell, notice
        self.process: BaseProcess | None = None
        self.stopped = False

    def __call__(self) -> None:
        """Run what is left."""
        from submitit import JobEnvironment

        job, cell = JobEnvironment().job_id, self.cell
        signal.signal(signal.SIGTERM, self._stop)
        os.environ["OMP_NUM_THREADS"] = str(self.sweep.threads)
        for _ in range(60):  # the records are written after the submission
            if state.job_of(cell):
                break
            sleep(1)
        while not self.stopped and state.state_of(cell) == "submitted" and state.job_of(cell) == job:
            try:
                status = self._run(state.prepare(cell, job), cell.folder / state.LOG)
            except UserError as error:  # such as too few GPUs
                state.give_up(cell, str(error))
                return
            if not self.stopped:
                state.end(cell, status)

    def _run(self, commands: list[list[str]], log: Path) -> int:
        """Run commands as ``worker.start`` does, and return the exit status."""
        from submitit import JobEnvironment

        devices = runner.slots_of(self.sweep, 1)[0]
        # SLURM sends submitit's signal to all processes of the job; here it is for this one.
        blocked = {signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]}
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        self.process = worker.start(commands, log, devices, "spawn")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        return worker.finish(self.process)

    def _stop(self, *_: Any) -> None:
        """Remember that SLURM ends the job; its processes have the signal, too."""
        self.stopped = True

    def checkpoint(self) -> DelayedSubmission:
        """Have the run save its state; submitit then queues the job again."""
        from submitit.helpers import DelayedSubmission

        self.stopped = True
        if self.process is not None and self.process.is_alive():
            assert self.process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            self.process.join(0.8 * self.notice)
        return DelayedSubmission(Job(self.sweep, self.cell, self.notice))


def refresh(cells: Iterable[Cell]) -> dict[str, str]:
    """Record in the cells' folders which jobs ended without a record; return the queue's states by id.

    They are empty where there is no SLURM, or it does not answer.
    """
    jobs = {job: cell for cell in cells if (job := state.job_of(cell))}
    if not jobs or not shutil.which("squeue"):
        return {}
    command = ["squeue", "--array", "--noheader", "--format=%i|%T"]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        print(f"The states of jobs are unknown: {asked.stderr.strip()}; try again later.", file=sys.stderr)
        return {}
    queue = dict(line.split("|") for line in asked.stdout.splitlines() if "|" in line)
    for job in jobs.keys() - queue.keys():
        state.give_up(jobs[job], f"job {job} ended without a record (sacct -j {job} may say why)")
    return queue
