"""Runs cells in parallel; a failing cell does not stop the others."""

import os
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tqdm import tqdm

from ..errors import UserError
from ..files import only_one
from . import state, worker
from .cells import Cell
from .spec import Sweep, command_words


def run_all(sweep: Sweep, left: Sequence[Cell], done: int) -> None:
    """Run the preparations and the cells that are left; ``done`` is the number of finished cells."""
    slots = slots_of(sweep, sweep.jobs)
    os.environ["OMP_NUM_THREADS"] = str(sweep.threads)  # read by each process when it imports torch
    waiting, failed = list(left), 0
    running: dict[BaseProcess, tuple[Cell, str | None]] = {}
    with only_one(Path(sweep.output)):
        prepare(sweep)
        try:
            # In a log, one line per cell replaces the bar.
            with tqdm(total=done + len(left), initial=done, unit="cell", disable=None) as bar:
                while running or any(map(state.ready, waiting)):
                    while slots and (cell := next(filter(state.ready, waiting), None)):
                        waiting.remove(cell)
                        slot, commands = slots.pop(0), state.prepare(cell)
                        running[worker.start(commands, cell.folder / state.LOG, slot)] = cell, slot
                    bar.set_postfix_str(f"{len(running)} running, {failed} failed, {len(waiting)} waiting")
                    ended = wait([process.sentinel for process in running])
                    for process in [process for process in running if process.sentinel in ended]:
                        process.join()
                        assert process.exitcode is not None
                        cell, slot = running.pop(process)
                        slots.append(slot)
                        if not state.end(cell, process.exitcode):
                            waiting.insert(0, cell)
                            continue
                        bar.update()
                        if state.state_of(cell) == "failed":
                            failed += 1
                            tqdm.write(f"{cell.name} failed: {state.reason(cell)}")
                        elif bar.disable:
                            print(f"{cell.name} done")
            for cell in waiting:
                assert cell.after is not None
                print(f"{cell.name} was not run: {cell.after.name} failed")
        finally:
            for process in running:
                worker.kill(process)


def _gpus() -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").removeprefix("-1")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def slots_of(sweep: Sweep, jobs: int) -> list[str | None]:
    """Return the visible GPUs of each parallel cell; None for CPUs."""
    if not sweep.devices:
        if unused := len(_gpus()):
            print(f"Cells run on CPUs, as devices is 0 in the sweep; this machine has {unused} GPUs.")
        return [None] * jobs
    needed, gpus = jobs * sweep.devices, _gpus()
    if needed > len(gpus):
        raise UserError(
            f"{jobs} jobs with {sweep.devices} GPUs each need {needed}, but there are {len(gpus)}; "
            "give fewer --jobs, or set devices to 0 to run on CPUs."
        )
    return [",".join(gpus[i : i + sweep.devices]) for i in range(0, needed, sweep.devices)]


def prepare(sweep: Sweep) -> None:
    """Make the missing preparations, on all GPUs if cells have some."""
    gpus = ",".join(_gpus()) if sweep.devices else None
    for number, preparation in enumerate(sweep.preparations(), 1):
        if Path(preparation.output).exists():
            continue
        print(f"Preparing {preparation.output}: pacmr {preparation.command}")
        log = Path(sweep.output) / f"prepare-{number}.txt"
        log.unlink(missing_ok=True)
        words = state.resuming(command_words(preparation.command))
        failed = worker.finish(worker.start([words], log, gpus))
        if failed or not Path(preparation.output).exists():
            raise UserError(
                f"pacmr {preparation.command} did not make {preparation.output} ({state.last_line(log)}); "
                f"look into {log}."
            )
