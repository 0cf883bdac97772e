"""One page of what the VNets of several runs believe, and how far apart they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from scipy.interpolate import RegularGridInterpolator

from ..analysis.surface import Surface, load
from ..command_line.parser import run_tool
from ..errors import UserError
from ..files import replacing, save_figure

NOTES = (
    "mean, max: of |g - g'| where the grids of both runs reach",
    "r: Pearson correlation of g and g' there",
    "common: that part's area as a share of the smaller grid's",
    "scale sd: each run's u and Delta divided by their standard deviations",
)


def distance(first: Surface, second: Surface, scaled: bool = False) -> dict[str, float]:
    """How far apart two weight functions g are where both grids reach.

    Both are interpolated linearly at the points of a regular grid over the common rectangle, as fine as the
    finer of the two.

    Args:
        first: one run's surface.
        second: another's.
        scaled: divide each run's Delta and u by their standard deviations over its visits before.

    Returns:
        ``mean`` and ``max`` of the absolute difference of g; ``correlation``, Pearson's, NaN where either g
        is constant; ``common``, the area of the common rectangle as a share of the smaller grid's. The first
        three are NaN where the grids have nothing in common.
    """
    axes = [_axes(surface, scaled) for surface in (first, second)]
    common = []
    for one, other in zip(*axes, strict=True):
        low, high = max(one[0], other[0]), min(one[-1], other[-1])
        common.append(np.linspace(low, high, max(len(one), len(other))) if low < high else np.empty(0))
    if not all(map(len, common)):
        return {"mean": np.nan, "max": np.nan, "correlation": np.nan, "common": 0.0}
    points = np.meshgrid(*common, indexing="ij")
    g, h = (
        RegularGridInterpolator(pair, surface.g)(tuple(points))
        for pair, surface in zip(axes, (first, second), strict=True)
    )
    difference = np.abs(g - h)
    constant = np.ptp(g) == 0 or np.ptp(h) == 0
    return {
        "mean": float(difference.mean()),
        "max": float(difference.max()),
        "correlation": np.nan if constant else float(np.corrcoef(g.ravel(), h.ravel())[0, 1]),
        "common": _area(common) / min(map(_area, axes)),
    }


def _axes(surface: Surface, scaled: bool) -> tuple[np.ndarray, np.ndarray]:
    if not scaled:
        return surface.delta, surface.u
    visits = surface.visits
    # Equal values have no scale.
    delta, u = (np.std(values, dtype=np.float64) or 1.0 for values in (visits.delta, visits.u))
    return surface.delta / delta, surface.u / u


def _area(axes: Sequence[np.ndarray]) -> float:
    return float(np.prod([axis[-1] - axis[0] for axis in axes]))


def distances(surfaces: Sequence[Surface], names: Sequence[str]) -> pd.DataFrame:
    """The distances of each two runs; of two tasks, whose scales differ, also on scaled axes.

    Args:
        surfaces: of at least two runs.
        names: of the runs.

    Returns:
        Rows with ``first`` and ``second`` (names), ``step`` of each, ``scale`` ("as is" or "sd"), and what
        ``distance`` returns.
    """
    rows = []
    for (one, name), (other, its_name) in combinations(zip(surfaces, names, strict=True), 2):
        for scaled in (False, True)[: 1 + (one.task != other.task)]:
            labels = {"first": name, "second": its_name, "first_step": one.step, "second_step": other.step}
            rows.append({**labels, "scale": "sd" if scaled else "as is", **distance(one, other, scaled)})
    return pd.DataFrame(rows)


def headings(surfaces: Sequence[Surface], runs: Sequence[str]) -> list[str]:
    """What tells the runs apart: their noise; with the task, or else the folder, where that does not."""
    noise = ["noise unknown" if np.isnan(s.noise_rate) else f"{s.noise_rate:.0%} noise" for s in surfaces]
    with_task = [f"{s.task}, {words}" for s, words in zip(surfaces, noise, strict=True)]
    folders = [Path(run).resolve().name for run in runs]
    with_folder = [f"{words} ({name})" for name, words in zip(folders, noise, strict=True)]
    choices = (noise, with_task, with_folder)
    return next((names for names in choices if len(set(names)) == len(names)), list(runs))


def surfaces_page(runs: Sequence[str], output: str, step: int | None = None) -> pd.DataFrame | None:
    """Draws the runs' surfaces and weights side by side, and writes the distances between them.

    Args:
        runs: folders of runs with the VNetSurfaces callback.
        output: .png or .pdf file; both are written, and the distances as .csv beside them.
        step: policy update whose surfaces to take; None for each run's last.

    Returns:
        The rows of ``distances``; None for a single run.

    Raises:
        UserError: the file has another ending, a run has no such surfaces, or they are over other features.
    """
    path = Path(output)
    if path.suffix not in (".png", ".pdf"):
        raise UserError(f"output is {output}, but the figure's name must end in .png or .pdf.")
    named = list(dict.fromkeys(runs))
    found = sorted(
        ((load(run, step), run) for run in named),
        # Unknown noise last.
        key=lambda pair: (np.isnan(pair[0].noise_rate), pair[0].noise_rate),
    )
    surfaces, folders = zip(*found, strict=True)
    for surface, folder in found:
        if surface.axes != surfaces[0].axes:
            one, other = (" and ".join(each.axes) for each in (surfaces[0], surface))
            raise UserError(
                f"The surfaces of {folders[0]} are over {one}, those of {folder} over {other}; name runs "
                "whose VNetSurfaces draws the same features."
            )
    names = headings(surfaces, folders)
    from ..analysis.surface_figure import draw_page

    save_figure(draw_page(surfaces, names), path.with_suffix(""))
    if len(surfaces) == 1:
        return None
    table = distances(surfaces, names)
    with replacing(path.with_suffix(".csv")) as temporary:
        table.to_csv(temporary, index=False)
    return table


def _show(rows: pd.DataFrame) -> None:
    console = Console(markup=False)
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown.add_column("runs")
    scaled = rows["scale"].eq("sd").any()
    for heading in (*(("scale",) if scaled else ()), "mean", "max", "r", "common"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for _, row in rows.iterrows():
        numbers = [f"{row['mean']:.3f}", f"{row['max']:.3f}", f"{row['correlation']:.3f}"]
        cells = ["-" if number == "nan" else number for number in numbers]
        scale = (row["scale"],) if scaled else ()
        shown.add_row(f"{row['first']} - {row['second']}", *scale, *cells, f"{row['common']:.0%}")
    console.print(shown)
    for note in NOTES[: 3 + scaled]:
        console.print(f"  {note}", highlight=False, style="dim")


def surfaces(runs: list[str], *, output: str, step: int | Literal["last"] = "last") -> None:
    """Lays the VNets of several runs side by side, and prints how far apart their weight functions are.

    Args:
        runs: folders of runs with the callback VNetSurfaces.
        output: .png or .pdf; both are written, and the distances as .csv beside them.
        step: policy update whose surfaces to take; "last" is each run's last one.
    """
    found = surfaces_page(runs, output, None if step == "last" else step)
    if found is not None:
        _show(found)
    Console(markup=False).print(f"Figure: {output}", highlight=False)


def main(arguments: list[str]) -> None:
    """``pacmr surfaces RUN [RUN ...] --output FILE [--step last|N]``."""
    run_tool("surfaces", surfaces, arguments, positional=True)
