"""Weight functions of several runs on one page, and their distances."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.interpolate import RegularGridInterpolator

from ..errors import UserError
from ..files import local_path, save_figure, write_frame
from .surface import Surface, load_surface, steps_of


def write_surface_page(runs: Sequence[str], output: str, step: int | None = None) -> pd.DataFrame:
    """Draw the last surfaces of runs (or those of ``step``) side by side, and return ``pairwise_distances``.

    ``output`` ends in .png or .pdf; both are written, and the distances as .csv beside them. Runs without
    surfaces are left out; UserError if none has any.
    """
    path = local_path(output)
    if path.suffix not in (".png", ".pdf"):
        raise UserError(f"output is {output}, but the figure's name must end in .png or .pdf.")
    drawn = [run for run in dict.fromkeys(runs) if steps_of(run)] or runs[:1]
    found = [(load_surface(run, step), run) for run in drawn]
    # Unknown noise rates last.
    found.sort(key=lambda pair: (np.isnan(pair[0].noise_rate), pair[0].noise_rate))
    laid_out, folders = zip(*found, strict=True)
    names = run_names(laid_out, folders)
    from .surface_figure import draw_page

    save_figure(draw_page(laid_out, names), path.with_suffix(""))
    table = pairwise_distances(laid_out, names)
    if len(table):
        write_frame(path.with_suffix(".csv"), table)
    return table


def surface_differences(first: Surface, second: Surface, scaled: bool = False) -> dict[str, float]:
    """Return the distance of two weight functions g, interpolated on the grids' common rectangle.

    ``scaled`` first divides Delta and u by their standard deviations over each run's visits. Returns ``mean``
    and ``max`` absolute difference, Pearson's ``correlation`` (NaN if either g is constant) and ``common``,
    the rectangle's area as a share of the smaller grid's. All but the last are NaN without overlap.
    """
    axes = []
    for surface in (first, second):
        values = (surface.visits.delta, surface.visits.u)
        # Equal values have no scale.
        units = [np.std(each, dtype=np.float64) or 1.0 if scaled else 1.0 for each in values]
        axes.append((surface.delta / units[0], surface.u / units[1]))
    common = []
    for one, other in zip(*axes, strict=True):
        low, high = max(one[0], other[0]), min(one[-1], other[-1])
        common.append(np.linspace(low, high, max(len(one), len(other))) if low < high else np.empty(0))
    if not all(map(len, common)):
        return {"mean": np.nan, "max": np.nan, "correlation": np.nan, "common": 0.0}
    points = tuple(np.meshgrid(*common, indexing="ij"))
    g, h = (
        RegularGridInterpolator(pair, surface.g)(points)
        for pair, surface in zip(axes, (first, second), strict=True)
    )
    difference = np.abs(g - h)
    constant = np.ptp(g) == 0 or np.ptp(h) == 0
    area, *areas = (float(np.prod([axis[-1] - axis[0] for axis in pair])) for pair in (common, *axes))
    return {
        "mean": float(difference.mean()),
        "max": float(difference.max()),
        "correlation": np.nan if constant else float(np.corrcoef(g.ravel(), h.ravel())[0, 1]),
        "common": area / min(areas),
    }


def pairwise_distances(surfaces: Sequence[Surface], names: Sequence[str]) -> pd.DataFrame:
    """Return pairwise distances; with different tasks also on scaled axes (``scale`` "sd")."""
    rows = []
    for (one, name), (other, its_name) in combinations(zip(surfaces, names, strict=True), 2):
        for scaled in (False, True)[: 1 + (one.task != other.task)]:
            labels = {"first": name, "second": its_name, "first_step": one.step, "second_step": other.step}
            rows.append(
                {**labels, "scale": "sd" if scaled else "as is", **surface_differences(one, other, scaled)}
            )
    return pd.DataFrame(rows)


def run_names(surfaces: Sequence[Surface], runs: Sequence[str]) -> list[str]:
    """Return names that tell runs apart: noise rate, then task, or else folder."""
    noise = ["noise unknown" if np.isnan(s.noise_rate) else f"{s.noise_rate:.0%} noise" for s in surfaces]
    with_task = [f"{s.task}, {words}" for s, words in zip(surfaces, noise, strict=True)]
    folders = [Path(run).resolve().name for run in runs]
    with_folder = [f"{words} ({name})" for name, words in zip(folders, noise, strict=True)]
    choices = (noise, with_task, with_folder)
    return next((names for names in choices if len(set(names)) == len(names)), list(runs))
