"""Runs a sweep and makes its tables and figures (``pacmr sweep``)."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from ..command_line.exceptions import user_error
from ..command_line.parser import run_tool
from ..errors import UserError
from ..sweep.cells import Cell, cells, config_contents
from ..sweep.slurm import SlurmOptions, refresh, submit
from ..sweep.spec import Sweep, read_sweep
from ..sweep.state import has_begun, job_of, reason, state_of


def run_sweep(
    file: str,
    jobs: int | None = None,
    launcher: Literal["local", "slurm"] = "local",
    slurm: SlurmOptions = SlurmOptions(),  # noqa: B008
    dry_run: bool = False,
    tables_only: bool = False,
    retry_failed: bool = False,
) -> None:
    """Runs methods x noise rates x options x seeds as a sweep file says; makes their tables and figures.

    Each cell is one run of pacmr fit in its own folder. Finished cells are skipped and interrupted ones go on
    from their last checkpoint, so the same command continues a sweep. With --launcher slurm it submits
    what is left as jobs, shows their state and ends.

    Args:
        file: sweep file, such as configs/sweeps/world.yaml.
        jobs: cells at once, instead of the file's; with SLURM jobs at once, by default as many as it starts.
        launcher: local runs the cells on this machine, slurm submits them as jobs.
        slurm: options of --launcher slurm.
        dry_run: check the file, and print the cells' commands.
        tables_only: make tables and figures of the finished cells.
        retry_failed: also run the cells that have failed.

    Raises:
        UserError: the sweep file or what it names is wrong.
    """
    sweep = read_sweep(file, jobs)
    found = cells(sweep)
    if slurm != SlurmOptions() and launcher == "local":
        raise UserError("--slurm options have no effect without --launcher slurm; add it, or leave them out.")
    queue = refresh(found)
    if dry_run:
        show(sweep, found)
        return
    if not tables_only:
        submitter = partial(submit, sweep, options=slurm, jobs=jobs)
        run_cells(sweep, found, retry_failed, submitter if launcher == "slurm" else None)
        queue = refresh(found)
    for cell in found:
        if state_of(cell) == "submitted" and (job := job_of(cell)):
            word = queue.get(job, "SLURM does not answer here")
            running = has_begun(cell) and word == "RUNNING"
            print(f"{cell.name} {f'runs in job {job}' if running else f'is submitted as job {job} ({word})'}")

    def tables(done: list[Cell]) -> Path:
        from ..sweep.tables import report

        return report(sweep, done)

    finish(found, tables)


def show(sweep: Sweep, found: list[Cell], note: str = "") -> None:
    """Check the cells' options, and print commands and number of cells, with a note."""
    states = [state_of(cell) for cell in found]
    check_swept_options(found)
    for preparation in sweep.preparations():
        there = " (is there)" if Path(preparation.output).exists() else ""
        print(f"{preparation.output}{there}: pacmr {preparation.command}")
    for cell, its in zip(found, states, strict=True):
        commands = [f"pacmr {shlex.join(words)}" for words in (cell.first, cell.arguments) if words]
        print(f"{cell.name} ({its}): {' && '.join(commands)}")
    print(f"{len(found)} cells{note}")


def run_cells(
    sweep: Sweep,
    found: list[Cell],
    retry_failed: bool,
    submitter: Callable[[list[Cell]], None] | None = None,
) -> None:
    """Run the cells that are left, or submit them; Ctrl-C ends the program."""
    wanted = ("waiting", "failed") if retry_failed else ("waiting",)
    states = [state_of(cell) for cell in found]
    left = [cell for cell, its in zip(found, states, strict=True) if its in wanted]
    if not left:
        return
    check_swept_options(left)
    if submitter:
        submitter(left)
        return
    from ..sweep.runner import run_all

    try:
        run_all(sweep, left, states.count("done"))
    except KeyboardInterrupt:
        print("Stopped; the same command goes on.")
        sys.exit(130)


def finish(found: list[Cell], report: Callable[[list[Cell]], Path]) -> None:
    """Write the report of finished cells; name failed ones and exit with status 1."""
    states = {cell.name: state_of(cell) for cell in found}
    done, failed = ([cell for cell in found if states[cell.name] == its] for its in ("done", "failed"))
    if done:
        print(f"Tables and figures of {len(done)} cells: {report(done)}")
    for cell in failed:
        print(f"{cell.name} failed: {reason(cell)} ({cell.folder})")
    if failed:
        print(f"{len(failed)} of {len(found)} cells failed; --retry_failed runs them again.")
        sys.exit(1)


def check_swept_options(found: list[Cell]) -> None:
    """Parse the cells' arguments as ``pacmr fit`` would, once per method and variation."""
    from .fit import parser_of

    parser = parser_of("fit")
    variants = {json.dumps([cell.method, cell.variation]): cell for cell in found}
    for cell in variants.values():
        config_contents(cell)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.instantiate(parser.parse_args(cell.arguments[1:]))
            continue
        except SystemExit:
            reason = said.getvalue().strip().rpartition("\n")[2].removeprefix("pacmr: error: ")
        except Exception as error:
            cause = user_error(error)
            if cause is None:
                raise
            reason = str(cause)
        raise UserError(f"The cell {cell.name} cannot run: {reason}")


def main(arguments: list[str]) -> None:
    """``pacmr sweep FILE [--jobs N] [--launcher slurm] [--dry_run] [--tables_only] [--retry_failed]``."""
    run_tool("sweep", run_sweep, arguments, positional=True)
