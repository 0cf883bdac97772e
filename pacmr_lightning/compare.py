"""A table of finished runs side by side, and a figure of how they learned."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .errors import UserError
from .run_folder import SUMMARY

COLUMNS = {
    "noise": ("noise_rate", "{:.0%}"),
    "clean accuracy": ("val_accuracy", "{:.3f}"),
    "margin": ("val_margin", "{:.2f}"),
    "gold reward": ("val/gold_reward", "{:.2f}"),
    "± s.e.": ("val/gold_reward_stderr", "{:.2f}"),
    "weight gap": ("weight_gap", "{:.2f}"),
    "AUROC weight": ("flip_auroc", "{:.2f}"),
    "AUROC u": ("flip_auroc_u", "{:.2f}"),
    "seconds": ("seconds", "{:.0f}"),
}
"""Heading, key of the summary (or of its ``metrics``) and format of each column."""

NOTES = (
    "clean accuracy, margin: on validation pairs with clean labels",
    "gold reward: mean of sampled responses, where the world knows it",
    "weight gap: mean weight of unflipped minus flipped training pairs, over the last pairs visited",
    "AUROC: how well a low weight, or a low reward difference u, points at flipped labels (0.5: not at all)",
)


def read_summary(run: str | Path) -> dict[str, Any]:
    """The numbers of a finished run.

    Raises:
        UserError: the folder holds no readable summary.
    """
    path = Path(run) / SUMMARY
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; name the folder of a run that has finished with the RunSummary callback."
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); train again.") from None


def table(runs: list[str]) -> Table:
    """One row a run; columns that no run knows are left out."""
    summaries = [read_summary(run) for run in runs]
    found = [{**summary["metrics"], **summary} for summary in summaries]
    shown = {h: (k, f) for h, (k, f) in COLUMNS.items() if any(s.get(k) is not None for s in found)}
    result = Table()
    result.add_column("method")
    for heading in shown:
        result.add_column(heading, justify="right")
    for summary in found:
        cells = (
            "-" if summary.get(key) is None else form.format(summary[key]) for key, form in shown.values()
        )
        result.add_row(summary["method"], *cells)
    return result


def main(arguments: list[str]) -> None:
    """``pacmr compare RUN [RUN ...] [--figure FILE]``."""
    parser = argparse.ArgumentParser(prog="pacmr compare", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a finished run")
    parser.add_argument("--figure", metavar="FILE", help="also draw learning curves and weights (.png, .pdf)")
    options = parser.parse_args(arguments)
    console = Console()
    console.print(table(options.runs))
    for note in NOTES:
        console.print(f"  {note}", highlight=False)
    if options.figure:
        from .compare_figure import draw

        draw(options.runs, options.figure)
        console.print(f"Figure: {options.figure}", highlight=False)
