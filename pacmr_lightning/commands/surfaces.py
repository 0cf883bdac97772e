"""Command ``pacmr surfaces``: VNet weight functions of several runs on one page, and their distances."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from rich.console import Console

from ..analysis.surface import load_surface
from ..analysis.surface_distance import pairwise_distances, run_names
from ..command_line.output import print_result
from ..command_line.parser import run_tool
from ..command_line.plain_table import plain_table
from ..errors import UserError
from ..files import replacing, save_figure

NOTES = (
    "mean, max: of |g - g'| where the grids of both runs reach",
    "r: Pearson correlation of g and g' there",
    "common: that part's area as a share of the smaller grid's",
    "scale sd: each run's u and Delta divided by their standard deviations",
)


def surfaces(runs: list[str], *, output: str, step: int | Literal["last"] = "last") -> pd.DataFrame | None:
    """Draws the VNets of several runs side by side, and prints the distances of their weight functions.

    Args:
        runs: folders of runs with the callback VNetSurfaces.
        output: .png or .pdf; both are written, and the distances as .csv beside them.
        step: policy update whose surfaces to take; "last" is each run's last one.

    Returns:
        The rows of ``distances``; None for a single run.
    """
    path = Path(output)
    if path.suffix not in (".png", ".pdf"):
        raise UserError(f"output is {output}, but the figure's name must end in .png or .pdf.")
    found = [(load_surface(run, None if step == "last" else step), run) for run in dict.fromkeys(runs)]
    # Unknown noise rates last.
    found.sort(key=lambda pair: (np.isnan(pair[0].noise_rate), pair[0].noise_rate))
    laid_out, folders = zip(*found, strict=True)
    for surface, folder in found:
        if surface.axes != laid_out[0].axes:
            one, other = (" and ".join(each.axes) for each in (laid_out[0], surface))
            raise UserError(
                f"The surfaces of {folders[0]} are over {one}, those of {folder} over {other}; name runs "
                "whose VNetSurfaces draws the same features."
            )
    names = run_names(laid_out, folders)
    from ..analysis.surface_figure import draw_page

    save_figure(draw_page(laid_out, names), path.with_suffix(""))
    table = None
    if len(laid_out) > 1:
        table = pairwise_distances(laid_out, names)
        with replacing(path.with_suffix(".csv")) as temporary:
            table.to_csv(temporary, index=False)
        _show(table)
    Console(markup=False).print(f"Figure: {output}", highlight=False)
    return table


def _show(rows: pd.DataFrame) -> None:
    scaled = rows["scale"].eq("sd").any()
    shown = plain_table("runs", *(("scale",) if scaled else ()), "mean", "max", "r", "common")
    for row in rows.to_dict("records"):
        numbers = (row["mean"], row["max"], row["correlation"])
        cells = ["-" if np.isnan(number) else f"{number:.3f}" for number in numbers]
        scale = (row["scale"],) if scaled else ()
        shown.add_row(f"{row['first']} - {row['second']}", *scale, *cells, f"{row['common']:.0%}")
    print_result(shown)
    console = Console(markup=False)
    for note in NOTES[: 3 + scaled]:
        console.print(f"  {note}", highlight=False, style="dim")


def main(arguments: list[str]) -> None:
    """``pacmr surfaces RUN [RUN ...] --output FILE [--step last|N]``."""
    run_tool("surfaces", surfaces, arguments, positional=True)
