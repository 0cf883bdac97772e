"""Runs the cells that are left, several at once; one that dies does not take the others down."""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ..errors import UserError
from . import state, worker
from .cells import Cell
from .spec import Sweep


def run(sweep: Sweep, left: Sequence[Cell], done: int, console: Console) -> None:
    """Prepares what has to be there, and runs the cells; each leaves its exit status in its folder.

    Args:
        sweep: says how many at once, and on what.
        left: the cells to run.
        done: cells that are done already, for the progress.
        console: shows it.

    Raises:
        UserError: another process runs this sweep, a preparation failed, or there are too few GPUs.
    """
    slots = _slots(sweep)
    os.environ["OMP_NUM_THREADS"] = str(sweep.threads)  # read by each process when it imports torch
    waiting = list(left)
    running: dict[BaseProcess, tuple[Cell, str | None]] = {}
    with _only_one(Path(sweep.output)):
        _prepare(sweep, console)
        try:
            with _Progress(console, done, len(left)) as progress:
                while running or any(map(state.ready, waiting)):
                    while slots and (cell := next(filter(state.ready, waiting), None)):
                        waiting.remove(cell)
                        slot, commands = slots.pop(0), state.prepare(cell)
                        running[worker.start(commands, cell.folder / state.LOG, slot)] = cell, slot
                    progress.show(len(running), len(waiting))
                    ended = wait([process.sentinel for process in running])
                    for process in [process for process in running if process.sentinel in ended]:
                        process.join()
                        assert process.exitcode is not None
                        cell, slot = running.pop(process)
                        slots.append(slot)
                        if state.end(cell, process.exitcode):
                            progress.ended(cell)
                        else:
                            waiting.insert(0, cell)
                    progress.show(len(running), len(waiting))
            for cell in waiting:
                assert cell.after is not None  # otherwise it would have run
                console.print(f"{cell.name} was not run: {cell.after.name} failed", highlight=False)
        finally:
            for process in running:
                worker.kill(process)


class _Progress:
    """A bar with counts and the time left, and a line for each cell that has failed."""

    def __init__(self, console: Console, done: int, left: int):
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"), console=console
        )
        self._task = self._bar.add_task("", total=done + left, completed=done, left="")
        self._done, self._failed = done, 0
        self._ended, self._begin = 0, time.monotonic()

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def ended(self, cell: Cell) -> None:
        """Counts a cell that has run."""
        self._ended += 1
        if state.state(cell) == "failed":
            self._failed += 1
            self._console.print(f"{cell.name} failed: {state.reason(cell)}", highlight=False, markup=False)
        else:
            self._done += 1
            if not self._console.is_terminal:  # where there is no bar
                self._console.print(f"{cell.name} done", highlight=False, markup=False)

    def show(self, running: int, waiting: int) -> None:
        """Draws the bar; the time left is taken from the cells that have ended."""
        words = f"{self._done} done, {running} running, {self._failed} failed, {waiting} waiting"
        left = ""
        if self._ended:
            seconds = (time.monotonic() - self._begin) / self._ended * (running + waiting)
            left = f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
        self._bar.update(self._task, completed=self._done + self._failed, description=words, left=left)


def _gpus() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def _slots(sweep: Sweep) -> list[str | None]:
    """For each cell that runs at once, the GPUs that it sees."""
    if not sweep.devices:
        return [None] * sweep.jobs
    needed, gpus = sweep.jobs * sweep.devices, _gpus()
    if needed > len(gpus):
        raise UserError(
            f"{sweep.jobs} jobs with {sweep.devices} GPUs each need {needed}, but there are {len(gpus)}; "
            "give fewer --jobs, or set devices to 0 to run on CPUs."
        )
    return [",".join(gpus[i : i + sweep.devices]) for i in range(0, needed, sweep.devices)]


def _prepare(sweep: Sweep, console: Console) -> None:
    for number, preparation in enumerate(sweep.preparations(), 1):
        if Path(preparation.output).exists():
            continue
        console.print(f"Preparing {preparation.output}: pacmr {preparation.command}", highlight=False)
        log = Path(sweep.output) / f"prepare-{number}.txt"
        log.unlink(missing_ok=True)
        gpus = ",".join(_gpus()) if sweep.devices else None
        process = worker.start([shlex.split(preparation.command)], log, gpus)
        try:
            process.join()
        finally:
            worker.kill(process)
        if process.exitcode or not Path(preparation.output).exists():
            raise UserError(
                f"pacmr {preparation.command} did not make {preparation.output} ({state.last_line(log)}); "
                f"look into {log}."
            )


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Two sweeps in one folder would run the same cells."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another pacmr sweep works in {folder}; wait until it has ended.") from None
        yield
