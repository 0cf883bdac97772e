"""Command ``pacmr compare``: finished runs in a table and a figure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from typing import Any

from rich.console import Console
from rich.table import Table

from ..command_line.output import plain_table, print_result
from ..files import local_path
from ..runs.folder import SUMMARY, read_summary

COLUMNS = {
    "injected noise": ("{noise_rate:.0%}", "labels flipped on purpose; wrong labels in the data come on top"),
    "accuracy": (
        "{val_accuracy:.3f}",
        "validation pairs whose label the policy prefers (u > 0), labels as given",
    ),
    "gold reward": (
        "{val/gold_reward:.2f} ± {val/gold_reward_stderr:.2f}",
        "of sampled responses, mean ± standard error",
    ),
    "KL": (
        "{val/sequence_kl:.2f}",
        "to the reference, on sampled responses, in nats; compare rewards at similar KL",
    ),
    "gap": (
        "{weight_gap:.2f}",
        "mean weight of unflipped minus flipped pairs, over the last training pairs",
    ),
    "AUROC g": ("{flip_auroc:.2f}", "of low weights, for finding flipped labels"),
    "AUROC u": ("{flip_auroc_u:.2f}", "of low implicit reward margins u, for finding flipped labels"),
    "wall time": ("{wall_seconds:.0f} s", "whole fit, validation and sampling included"),
}
"""Format, over the keys of the summary and its ``metrics``, and meaning of each column, by heading."""


def comparison_table(runs: list[str]) -> Table:
    """Return a table of runs, without columns that no run has."""
    summaries = [read_summary(run) for run in runs]
    rows = [[_cell(form, summary) for form, _ in COLUMNS.values()] for summary in summaries]
    result = plain_table()
    result.add_column("method", no_wrap=True)
    known = [any(cells) for cells in zip(*rows, strict=True)]
    for heading in compress(COLUMNS, known):
        result.add_column(heading, justify="right", no_wrap=True)
    for summary, row in zip(summaries, rows, strict=True):
        result.add_row(summary["method"], *(cell or "-" for cell in compress(row, known)))
    return result


def _cell(form: str, summary: dict[str, Any]) -> str:
    known = {key: value for key, value in {**summary["metrics"], **summary}.items() if value is not None}
    if not known.get("noise_rate"):
        known.pop("noise_rate", None)  # nothing injected; the data's own noise rate is unknown, not 0
    try:
        return form.format_map(known)
    except KeyError:
        return ""


def _accuracy_notes(runs: list[str]) -> Iterator[str]:
    """Yield notes on accuracies that are older than the last update."""
    for run, found in ((run, read_summary(run)) for run in runs):
        if found.get("val_step") not in (None, found.get("steps")):
            yield f"{run}: accuracy after update {found['val_step']:,} of {found['steps']:,}"


def compare(runs: list[str], figure: str | None = None, output: str | None = None) -> None:
    """Prints a table of finished runs, and draws their learning curves and VNets' weight functions.

    With ``output``, unfinished runs are drawn too if the callback VNetSurfaces has saved their surfaces.

    Args:
        runs: folders of runs.
        figure: file for learning curves and weights, ending in .png or .pdf.
        output: file for the VNets' slopes, offsets and weights, ending in .png or .pdf; both are written.

    Raises:
        UserError: a run has no summary (and no surfaces), or a figure's name another ending.
    """
    console = Console(markup=False)
    finished = runs
    if output:
        from ..analysis.surface_page import steps_of, write_surface_page

        finished = [run for run in runs if (local_path(run) / SUMMARY).exists() or not steps_of(run)]
    if finished:
        table = comparison_table(finished)
        print_result(table)
        headings = [column.header for column in table.columns]
        notes = [f"{heading}: {meaning}" for heading, (_, meaning) in COLUMNS.items() if heading in headings]
        for note in [*notes, *_accuracy_notes(finished)]:
            console.print(f"  {note}", highlight=False, style="dim")
    if output:
        write_surface_page(runs, output)
        console.print(f"Figure: {output}", highlight=False)
    if figure:
        from ..analysis.learning_curves import draw_learning_curves

        draw_learning_curves(runs, figure)
        console.print(f"Figure: {figure}", highlight=False)
