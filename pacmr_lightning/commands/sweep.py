"""Runs methods x noise rates x options x seeds as a sweep file says, and makes their tables and figures."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from pathlib import Path

from rich.console import Console

from ..command_line.exceptions import user_error
from ..command_line.parser import run_tool
from ..errors import UserError
from ..sweep.cells import Cell, cells, config_contents
from ..sweep.spec import Sweep, read_sweep
from ..sweep.state import reason, state


def run_sweep(
    file: str,
    jobs: int | None = None,
    dry_run: bool = False,
    tables_only: bool = False,
    retry_failed: bool = False,
) -> None:
    """Runs methods x noise rates x options x seeds as a sweep file says; makes their tables and figures.

    Each cell is one run of pacmr fit in its own folder. Cells that are finished are skipped, and those that
    were interrupted go on from their last checkpoint: the same command continues a sweep.

    Args:
        file: sweep file, such as configs/sweeps/world.yaml.
        jobs: cells at once, instead of the file's.
        dry_run: check the file, and print the cells' commands.
        tables_only: make tables and figures of the finished cells.
        retry_failed: also run the cells that have failed.

    Raises:
        UserError: the sweep file or what it names is wrong.
    """
    console = Console()
    sweep = read_sweep(file, jobs)
    found = cells(sweep)
    states = {cell.name: state(cell) for cell in found}
    if dry_run:
        check_options(found)
        for preparation in sweep.preparations():
            there = " (is there)" if Path(preparation.output).exists() else ""
            print(f"{preparation.output}{there}: pacmr {preparation.command}")
        for cell in found:
            commands = [f"pacmr {shlex.join(words)}" for words in (cell.first, cell.arguments) if words]
            print(f"{cell.name} ({states[cell.name]}): {' && '.join(commands)}")
        tuning = sweep.frontier.tuning_seeds if sweep.frontier else []
        some = f" at most: of seeds other than {', '.join(map(str, tuning))} only what was best on these"
        print(f"{len(found)} cells{some if tuning else ''}")
        return
    if not tables_only:
        try:
            _run(sweep, found, ("waiting", "failed") if retry_failed else ("waiting",), console)
        except KeyboardInterrupt:
            console.print("Stopped; the same command goes on.")
            sys.exit(130)
    states = {cell.name: state(cell) for cell in found}
    done = [cell for cell in found if states[cell.name] == "done"]
    failed = [cell for cell in found if states[cell.name] == "failed"]
    if done:
        from ..sweep.report import report

        console.print(f"Tables and figures of {len(done)} cells: {report(sweep, done)}", highlight=False)
    for cell in failed:
        console.print(f"{cell.name} failed: {reason(cell)} ({cell.folder})", highlight=False, markup=False)
    if failed:
        console.print(f"{len(failed)} of {len(found)} cells failed; --retry_failed runs them again.")
        sys.exit(1)


def _run(sweep: Sweep, found: list[Cell], wanted: tuple[str, ...], console: Console) -> None:
    """Runs the cells that are left: a frontier's tuning seeds first, then what these have chosen."""
    from ..sweep.frontier import by_seeds, choosers, chosen_cells, left_out
    from ..sweep.results import results

    def run_left(cells: list[Cell]) -> None:
        states = [state(cell) for cell in cells]
        left = [cell for cell, its in zip(cells, states, strict=True) if its in wanted]
        if left:
            check_options(left)
            from ..sweep.runner import run

            run(sweep, left, states.count("done"), console)

    # The others have the same options, so what is wrong with one shows before anything runs.
    decide, others = by_seeds(sweep.frontier, found)
    run_left(decide)
    if others and (decided := [cell for cell in decide if state(cell) == "done"]):
        frame = results(sweep, decided)
        if note := left_out(frame, choosers(frame)):
            console.print(note, highlight=False, markup=False)
        run_left(chosen_cells(sweep, frame, others))


def check_options(found: list[Cell]) -> None:
    """Parses the cells' arguments as ``pacmr fit`` would, and makes the objects that they name.

    Cells that differ in noise rate and seed only are tried once.

    Raises:
        UserError: an option does not exist, or its value is wrong.
    """
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
    """``pacmr sweep FILE [--jobs N] [--dry_run] [--tables_only] [--retry_failed]``."""
    run_tool("sweep", run_sweep, arguments, positional=True)
