"""Runs a sweep's cells as SLURM jobs, through submitit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import ceil
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import write_text
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
PREPARED = "prepare-job.txt"
"""Id of the job that makes the preparations."""
ENDED = {
    "BOOT_FAIL": "its node failed to boot",
    "CANCELLED": "cancelled",
    "COMPLETED": "the job ended without a record",
    "DEADLINE": "its deadline passed",
    "FAILED": "its process was killed or failed",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "timed out",
    "UNKNOWN": "SLURM has no record of the job",
}
"""Reasons by SLURM's final job states."""


@dataclass(frozen=True)
class SlurmOptions:
    """Options of ``sbatch``, beside the sweep's threads and devices.

    Args:
        partition: partition of the jobs.
        account: account to charge.
        time: limit of a job, h:m:s. At its end a job saves its state, is queued again and goes on.
        cells_per_job: cells that one job runs, one after the other.
        sbatch: other options of sbatch, such as '{"mem": "64G", "constraint": "h100"}'.
    """

    partition: str | None = None
    account: str | None = None
    time: timedelta = timedelta(hours=24)
    cells_per_job: int = 1
    sbatch: dict[str, Any] = field(default_factory=dict)


def submit(
    sweep: Sweep, left: Sequence[Cell], options: SlurmOptions, jobs: int | None, cluster: str = "slurm"
) -> None:
    """Submit the missing preparations as one job, and the cells as an array that waits for it.

    At most ``jobs`` jobs run at once. ``cluster`` is submitit's name of it.

    Raises:
        UserError: submitit or SLURM is missing, or SLURM refuses a job.
    """
    try:
        import submitit
    except ImportError:
        raise UserError(
            "--launcher slurm needs the submitit package; install it with "
            "pip install 'pacmr-lightning[slurm]'."
        ) from None
    seconds = round(options.time.total_seconds())
    if seconds < 60 or options.cells_per_job < 1:
        raise UserError(
            f"--slurm.time is {options.time} and --slurm.cells_per_job {options.cells_per_job}, but they "
            "must be at least 0:01:00 and 1."
        )
    output = Path(sweep.output)
    notice = min(NOTICE, seconds // 4)
    with runner.only_one(output):
        # Another command may have submitted some since.
        left = [cell for cell in left if state.state_of(cell) != "submitted"]
        groups = _groups(left, options.cells_per_job)
        missing = any(not Path(preparation.output).exists() for preparation in sweep.preparations())
        if not groups and not missing:
            return
        try:
            executor = submitit.AutoExecutor(output / "slurm", cluster, slurm_max_num_timeout=TIMEOUTS)
            sbatch: dict[str, Any] = {"requeue": True, **options.sbatch}
            executor.update_parameters(
                name=output.name,
                timeout_min=ceil(seconds / 60),
                gpus_per_node=sweep.devices or None,
                cpus_per_task=sweep.threads,
                stderr_to_stdout=True,
                slurm_partition=options.partition,
                slurm_account=options.account,
                slurm_signal_delay_s=notice,
                slurm_array_parallelism=jobs or len(left),
                slurm_additional_parameters=sbatch,
            )
            if missing:
                made = _preparing(output)
                if made is None:
                    made = executor.submit(Job(sweep, left, notice, prepares=True)).job_id
                    write_text(output / PREPARED, made)
                    print(f"Submitted the preparations as job {made}")
                sbatch |= {"dependency": f"afterok:{made}", "kill-on-invalid-dep": "yes"}
                executor.update_parameters(slurm_additional_parameters=sbatch)
            if not groups:
                return
            started = executor.submit_array([Job(sweep, group, notice) for group in groups])
        except (RuntimeError, submitit.core.utils.FailedJobError) as error:
            raise UserError(f"SLURM takes no jobs here: {str(error).strip() or 'sbatch failed'}") from None
        for job, group in zip(started, groups, strict=True):
            for cell in group:
                state.submitted(cell, job.job_id)
    count = sum(map(len, groups))
    print(f"Submitted {count} cells as {len(groups)} jobs; the same command shows their state.")


def _groups(left: Sequence[Cell], least: int) -> list[list[Cell]]:
    """Return the cells of each job: at least ``least``, and a cell with its predecessor's."""
    chains: dict[Path, list[Cell]] = {}
    for cell in left:
        if cell.after and cell.after in chains:
            chains[cell.folder] = chains[cell.after]
        elif state.ready(cell):
            chains[cell.folder] = []
        else:
            assert cell.after is not None
            print(f"{cell.name} is not submitted: {cell.after.name} is not done")
            continue
        chains[cell.folder].append(cell)
    groups: list[list[Cell]] = []
    for chain in {id(chain): chain for chain in chains.values()}.values():
        if not groups or len(groups[-1]) >= least:
            groups.append([])
        groups[-1] += chain
    return groups


class Job:
    """A job's cells, one after the other, or all preparations; submitit pickles and calls it.

    At submitit's signal, and at SIGTERM, the run saves its state; a job that is queued again goes on.
    """

    def __init__(self, sweep: Sweep, cells: Sequence[Cell], notice: int, prepares: bool = False):
        self.sweep, self.cells, self.notice, self.prepares = sweep, list(cells), notice, prepares
        self.process: BaseProcess | None = None
        self.stopped = False

    def __call__(self) -> None:
        """Run what is left."""
        from submitit import JobEnvironment

        job = JobEnvironment().job_id
        signal.signal(signal.SIGTERM, self._stop)
        os.environ["OMP_NUM_THREADS"] = str(self.sweep.threads)
        if self.prepares:
            try:
                runner.prepare(self.sweep, self._run)
            except UserError as error:
                for cell in [] if self.stopped else self.cells:
                    state.give_up(cell, str(error))
                raise
            return
        for _ in range(60):  # the records are written after the submission
            if state.job_of(self.cells[-1]):
                break
            sleep(1)
        for cell in self.cells:
            while not self.stopped and state.state_of(cell) == "submitted" and state.job_of(cell) == job:
                if not state.ready(cell):
                    state.give_up(cell, f"{cell.after} failed")
                    continue
                try:
                    status = self._run(state.prepare(cell, job), cell.folder / state.LOG)
                except UserError as error:  # such as too few GPUs
                    state.give_up(cell, str(error))
                    continue
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
        return DelayedSubmission(Job(self.sweep, self.cells, self.notice, self.prepares))


def refresh(cells: Iterable[Cell]) -> dict[str, str]:
    """Record in the cells' folders which jobs ended without a record; return the states of others by id."""
    jobs = defaultdict(list)
    for cell in cells:
        if job := state.job_of(cell, or_killed=True):
            jobs[job].append(cell)
    found = _states(list(jobs))
    for job, word in found.items():
        for cell in jobs[job]:
            # A killed run may have been out of memory.
            if word in ENDED and (state.job_of(cell) or word == "OUT_OF_MEMORY"):
                state.give_up(cell, f"job {job}: {ENDED[word]}")
    return {job: word for job, word in found.items() if word not in ENDED}


def _preparing(output: Path) -> str | None:
    """Return the id of the job that makes the preparations, if it has not ended."""
    job = (output / PREPARED).read_text() if (output / PREPARED).exists() else ""
    return job if _states([job] if job else []).get(job, "UNKNOWN") not in ENDED else None


def _states(jobs: Sequence[str]) -> dict[str, str]:
    """Return SLURM's states of jobs by id; empty where there is no SLURM, or it does not answer."""
    if not jobs or not shutil.which("squeue"):
        return {}
    ids = ",".join(dict.fromkeys(job.partition("_")[0] for job in jobs))
    queue = ["squeue", "--jobs", ids, "--states=all", "--array", "--noheader", "--format=%i|%T"]
    asked = subprocess.run(queue, capture_output=True, text=True)
    if asked.returncode and "Invalid job id" not in asked.stderr:
        print(f"The states of jobs are unknown: {asked.stderr.strip()}; try again later.", file=sys.stderr)
        return {}
    found = _by_id(asked.stdout)
    if not found.keys() >= set(jobs):  # the queue forgets jobs after minutes; accounting may be off
        sacct = ["sacct", "--jobs", ids, "--allocations", "--allusers", "--noheader", "--parsable2"]
        asked = subprocess.run([*sacct, "--format=JobID,State"], capture_output=True, text=True)
        found = _by_id(asked.stdout) | found
    return {job: found.get(job, "UNKNOWN") for job in jobs}


def _by_id(text: str) -> dict[str, str]:
    rows = [line.split("|") for line in text.splitlines() if "|" in line]
    return {job: word.split()[0] for job, word in rows}
