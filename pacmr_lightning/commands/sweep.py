"""Command ``pacmr sweep``: runs of a sweep file, with their tables and figures."""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ..command_line.output import print_result
from ..command_line.short_forms import expanded
from ..errors import UserError, user_error
from ..files import local_path
from ..runs.folder import SUMMARY
from ..runs.shipped_configs import resolved
from ..sweep.cells import Cell, anchor_cells, cells, config_contents
from ..sweep.slurm import SlurmOptions, refresh, submit
from ..sweep.spec import Sweep, command_words, read_sweep
from ..sweep.state import given_options, job_of, reason, state_of, texts_in

_DATA_FILE = re.compile(r".*\.(jsonl?(\.gz)?|parquet)", re.DOTALL)


def sweep(
    file: str,
    jobs: int | None = None,
    launcher: Literal["local", "slurm"] = "local",
    slurm: SlurmOptions = SlurmOptions(),  # noqa: B008
    dry_run: bool = False,
    tables_only: bool = False,
    retry_failed: bool = False,
) -> None:
    """Runs methods x noise rates x options x seeds of a sweep file, and writes tables and figures.

    Each cell is one run of pacmr fit in its own folder. Finished cells are skipped and interrupted ones
    resume from their last checkpoint, so the same command continues a sweep. With ``evaluate`` in the file,
    the cells' responses are judged against those of its anchor. With --launcher slurm the command submits the
    remaining cells as jobs, shows their state and ends.

    Args:
        file: sweep file, such as configs/sweeps/world.yaml.
        jobs: number of parallel cells; default: that of the file, or SLURM's limit.
        launcher: "local" runs the cells on this machine, "slurm" submits them as jobs.
        slurm: options of --launcher slurm.
        dry_run: check the file, and that the cells' data exist or ``prepare`` makes them; print the commands.
        tables_only: write tables and figures of the trained cells and their stored judgements.
        retry_failed: also run failed cells again.

    Raises:
        UserError: the sweep file, or a file or option in it, is wrong.
    """
    sweep = read_sweep(file, jobs)
    all_cells = cells(sweep)
    for entry in _with_afterwards(sweep).preparations():
        _check_command(command_words(entry.command), f"The preparation of {entry.output}")
    if slurm != SlurmOptions() and launcher == "local":
        raise UserError("--slurm options have no effect without --launcher slurm; add it, or leave them out.")
    queue = refresh(all_cells)
    if dry_run:
        show(sweep, all_cells)
        return
    if not tables_only:
        submitter = partial(submit, options=slurm, jobs=jobs) if launcher == "slurm" else None
        run_cells(sweep, all_cells, retry_failed, submitter)
        queue = refresh(all_cells)
    for cell in all_cells:
        if (job := job_of(cell)) and state_of(cell) == "submitted":
            word = queue.get(job, "SLURM does not answer here")
            print_result(f"{cell.name} is submitted as job {job} ({word})")
    problem = None
    if not tables_only:
        try:
            _judge(sweep, all_cells, launcher)
        except UserError as error:  # after the tables of what is known
            problem = error
    from ..sweep.tables import report  # slow import

    failed = finish(all_cells, partial(report, sweep))
    if problem:
        raise problem
    if failed:
        sys.exit(1)


def _judge(sweep: Sweep, all_cells: list[Cell], launcher: str) -> None:
    """Judge the cells' responses, then run ``afterwards`` (or print it)."""
    if sweep.evaluate:
        from ..sweep.results import judge_cells

        judge_cells(sweep, all_cells)
    if sweep.afterwards and all(state_of(cell) == "done" for cell in all_cells):
        from ..sweep.runner import run_all

        if launcher == "local":
            run_all(_with_afterwards(sweep), [], len(all_cells))
        for entry in replace(sweep, prepare=sweep.afterwards).preparations():
            if not Path(entry.output).exists():
                print_result(f"{entry.output} is left to make: pacmr {entry.command}")


def _with_afterwards(sweep: Sweep) -> Sweep:
    return replace(sweep, prepare=[*sweep.prepare, *sweep.afterwards])


def show(sweep: Sweep, found: list[Cell], note: str = "") -> None:
    """Check the cells' options, and print their commands and number, with a note."""
    states = [state_of(cell) for cell in found]
    check_files(sweep, found, check_swept_options(found))
    if sweep.evaluate:
        check_evaluation(sweep, found)
    for preparation in _with_afterwards(sweep).preparations():
        there = " (exists)" if Path(preparation.output).exists() else ""
        print_result(f"{preparation.output}{there}: pacmr {preparation.command}")
    for cell, its in zip(found, states, strict=True):
        parts = (cell.first, cell.arguments, cell.predict and cell.prediction)
        commands = [f"pacmr {shlex.join(words)}" for words in parts if words]
        print_result(f"{cell.name} ({its}): {' && '.join(commands)}")
    print_result(f"{len(found)} cells{note}")


def run_cells(
    sweep: Sweep,
    found: list[Cell],
    retry_failed: bool,
    submitter: Callable[[Sweep, list[Cell]], None] | None = None,
) -> None:
    """Run or submit the remaining cells."""
    wanted = ("waiting", "failed") if retry_failed else ("waiting",)
    states = [state_of(cell) for cell in found]
    left = [cell for cell, its in zip(found, states, strict=True) if its in wanted]
    if not left:
        return
    check_files(sweep, left, check_swept_options(left))
    if sweep.evaluate:
        check_answers(sweep, left)
    if submitter:
        submitter(sweep, left)
        return
    from ..sweep.runner import run_all

    run_all(sweep, left, states.count("done"))


def finish(found: list[Cell], report: Callable[[list[Cell]], Path]) -> int:
    """Write the report of finished cells; print failed ones and return their number."""
    states = {cell.name: state_of(cell) for cell in found}
    failed = [cell for cell in found if states[cell.name] == "failed"]
    done = [cell for cell in found if (cell.folder / SUMMARY).exists()]
    if done:
        print(f"Tables and figures of {len(done)} cells: {report(done)}")
    for cell in failed:
        print(f"{cell.name} failed: {reason(cell)} ({cell.folder})")
    if failed:
        print(f"{len(failed)} of {len(found)} cells failed; --retry_failed runs them again.")
    return len(failed)


def check_swept_options(found: list[Cell], subcommand: str = "fit") -> dict[str, tuple[Any, Any]]:
    """Return parsed arguments and objects of ``pacmr fit`` or ``predict`` by ``Cell.variant``."""
    from ..callbacks import RunSummary  # slow import

    parsed: dict[str, tuple[Any, Any]] = {}
    seen: set[object] = set()
    for cell in found:
        # Some values are refused with one seed or noise rate only.
        parts = {cell.variant, ("noise", cell.noise), ("seed", cell.seed)}
        if parts <= seen:
            continue
        seen |= parts
        config_contents(cell)
        words = [subcommand, *cell.arguments[1:], *(cell.predict if subcommand == "predict" else [])]
        _, objects = parsed[cell.variant] = _parsed(words, f"The cell {cell.name}")
        if subcommand == "fit":
            if not any(isinstance(one, RunSummary) for one in objects.trainer.callbacks or ()):
                raise UserError(
                    f"The cell {cell.name} would write no {SUMMARY}, which the tables need; add the callback "
                    "RunSummary to trainer.callbacks."
                )
            _check_command(cell.first, f"first of the cell {cell.name}")
    return parsed


def check_files(sweep: Sweep, found: list[Cell], parsed: dict[str, tuple[Any, Any]]) -> None:
    """Raise a UserError if a cell's noise rate is not its data's, or if nothing makes a file that it reads.

    ``parsed`` is of ``check_swept_options``; what is in the sweep's own folder comes from cells.
    """
    for cell in found:
        config, objects = parsed[cell.variant]
        method, noise = sweep.methods[cell.method], getattr(objects.data, "noise", None)
        own, rate = method.options | method.vary, noise.rate if noise else 0.0  # None: its kind has no rate
        of_data = {name: value for name, value in (sweep.options | own).items() if name.startswith("data")}
        if rate not in (None, cell.noise) and "{noise}" not in str(of_data) and "data.noise_rate" not in own:
            raise UserError(
                f"The cell {cell.name} would have the noise rate {rate:g} in its data; add "
                'data.noise_rate: "{noise}" to options, or correct noise_rates.'
            )
        values = [given_options(cell.arguments), config.model.as_dict(), config.data.as_dict()]
        for _, text in texts_in(values):
            if not _DATA_FILE.fullmatch(text):
                continue
            if local_path(text).exists() or _made_later(sweep, text) or str(Path(sweep.output)) in text:
                continue
            options = vars(objects.data)
            if text == options.get("augmentations") and not options.get("meta_every"):
                continue  # read for meta-batches only
            raise UserError(
                f"The cell {cell.name} would read {text}, which does not exist and which no command of "
                "prepare makes; make it first, or name another file."
            )


def _parsed(words: list[str], what: str, with_objects: bool = True) -> tuple[Any, Any]:
    """Return configuration and objects of a ``pacmr`` command of LightningCLI, or raise a UserError."""
    from .fit import parser_of

    parser, said = parser_of(words[0]), io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = parser.parse_args(expanded(words)[1:])
            return config, parser.instantiate(config) if with_objects else None
    except SystemExit:
        reason = said.getvalue().strip().rpartition("\n")[2].removeprefix("pacmr: error: ")
    except Exception as error:
        cause = user_error(error)
        if cause is None:
            raise
        reason = str(cause)
    raise UserError(f"{what} cannot {words[0]}: {reason}")


def _check_command(words: list[str], place: str) -> None:
    """Raise a UserError for words that are no ``pacmr`` command, or none of LightningCLI that parses."""
    name = words[0] if words else ""
    if name in ("fit", "validate", "test", "predict"):
        configs = [value for option, value in pairwise(words) if option == "--config"]
        if all(Path(resolved(config)).is_file() for config in configs):  # others are made later
            _parsed(words, place, with_objects=False)  # objects may read files that are made later
    elif words and not Path(__file__).with_name(f"{name.replace('-', '_')}.py").exists():
        raise UserError(f"{place} begins with {name}, which is no command of pacmr; pacmr --help lists them.")


def check_evaluation(sweep: Sweep, found: list[Cell]) -> dict[str, tuple[Any, Any]]:
    """Raise a UserError if a cell has no baseline, or its options of ``predict`` are wrong.

    Returns configuration and objects of ``pacmr predict`` by ``Cell.variant``, empty if ``prepare`` creates
    the prompts or the judge later.
    """
    all_cells = cells(sweep)
    anchors = anchor_cells(sweep, all_cells)
    alone = [cell for cell in all_cells if cell.method != sweep.anchor and cell.name not in anchors]
    if alone or not anchors:
        why = f"{alone[0].name} has no baseline" if alone else "there is no other method"
        raise UserError(
            f"evaluate compares with cells of {sweep.anchor} of the same noise rate, seed and varied values, "
            f"but {why}; take vary away from {sweep.anchor}, or name another anchor."
        )
    if _made_later(sweep, str(sweep.evaluate)):
        return {}
    return check_swept_options(found, "predict")


def check_answers(sweep: Sweep, left: list[Cell]) -> None:
    """Raise a UserError if prompts are missing or the judge fails, unless ``prepare`` creates them."""
    from ..datamodules.evaluation_prompts import draw_prompts

    assert sweep.evaluate is not None
    if one := next(iter(check_evaluation(sweep, left).values()), None):
        config, objects = one
        if not _made_later(sweep, str(config.data.init_args.source)):
            draw_prompts(objects.data.source, objects.data.predict_prompts, objects.data.predict_seed)
    if not _made_later(sweep, str(sweep.evaluate.judge.settings)):
        sweep.evaluate.judge.check()


def _made_later(sweep: Sweep, text: str) -> bool:
    outputs = [preparation.output for preparation in sweep.preparations()]
    return any(output in text and not Path(output).exists() for output in outputs)
