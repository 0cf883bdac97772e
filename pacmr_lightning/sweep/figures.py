"""Figures of a sweep's measures by noise rate, and of its VNets."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from ..analysis.figures import draw_page
from ..analysis.surface import load_surface, steps_of
from ..files import save_figure
from .cells import Cell
from .results import MEASURES, seed_means

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colour-blind safe (Okabe and Ito), without yellow, which is too faint for lines."""
MARKERS = "osD^vP*X"


def draw_noise(frame: pd.DataFrame) -> Figure | None:
    """Draw methods in rows, a panel per measure, and mean ± standard error per noise rate.

    ``frame`` is from ``results.results``; None if no cell was validated. The win-score, which counts ties,
    stands for the win rate.
    """
    numbers = seed_means(frame)
    measures = [name for name in MEASURES if name in set(numbers["measure"]) and name != "win_rate"]
    if not measures:
        return None
    rows = frame.drop_duplicates("row").sort_values("bound", kind="stable")["row"].tolist()
    rates, places = sorted(frame["noise"].unique()), np.arange(len(rows))
    columns = min(3, len(measures))
    lines = -(-len(measures) // columns)
    tall = max(1, len(rates) / 4)  # rows of more rates are higher
    width = 0.3 + 0.075 * max(map(len, rows)) + 2.7 * columns
    ncols = min(len(rates), int(width))  # an inch for each rate in the legend
    height = 0.4 - 0.2 * (-len(rates) // ncols) + (0.7 + 0.24 * tall * len(rows)) * lines
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.06))
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for axis, name in zip(axes.flat, measures, strict=False):
        for i, rate in enumerate(rates):
            asked = numbers["measure"].eq(name) & numbers["noise"].eq(rate)
            points = numbers[asked].set_index("row").reindex(rows)
            beside = places + 0.22 / tall * (i - (len(rates) - 1) / 2)
            style: dict[str, Any] = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
            style |= {"ms": 4, "ls": "none", "elinewidth": 1, "label": f"{100 * rate:g}%"}
            axis.errorbar(points["mean"], beside, xerr=points["stderr"], **style)
        axis.set_xlabel(MEASURES[name].heading)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.ticklabel_format(axis="x", style="plain", useOffset=False)  # an offset would be on the label
        axis.grid(axis="x", alpha=0.3)
        for place in places[::2]:
            axis.axhspan(place - 0.5, place + 0.5, color="0.95", zorder=0)
    for axis in axes.flat[len(measures) :]:
        axis.remove()
    axes[0, 0].set(yticks=places, yticklabels=rows, ylim=(len(rows) - 0.5, -0.5))
    error = "\nmean ± standard error over seeds" if numbers["seeds"].max() > 1 else ""  # fits over one panel
    where: dict[str, Any] = {"loc": "outside upper center", "ncols": ncols, "frameon": False}
    shown = axes[0, 0].get_legend_handles_labels()
    legend = figure.legend(*shown, title=f"injected noise rate{error}", **where)
    legend.get_title().set_multialignment("center")
    return figure


def draw_vnets(done: Sequence[Cell], folder: Path) -> None:
    """Write VNet's surfaces and weights, noise rates in columns, for one seed: ``METHOD-step-NNNNN``.

    The steps are those that all runs of a method have saved.
    """
    pages: dict[str, list[Cell]] = {}
    for cell in done:
        if steps_of(cell.folder):
            name = re.sub(r"-seed\d+$", "", cell.name.replace(f"-noise{100 * cell.noise:g}", "", 1))
            runs = pages.setdefault(name, [])
            runs += [cell] if not runs or runs[0].seed == cell.seed else []
    for name, runs in pages.items():
        runs.sort(key=lambda cell: cell.noise)
        for step in sorted(set.intersection(*(set(steps_of(cell.folder)) for cell in runs))):
            surfaces = [load_surface(cell.folder, step) for cell in runs]
            page = draw_page(surfaces, [f"{100 * cell.noise:g}% noise" for cell in runs])
            save_figure(page, folder / f"{name}-step-{step:05d}")
