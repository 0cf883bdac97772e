"""Figures of a sweep's measures over noise rates and varied options."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from ..analysis.surface_page import steps_of, write_surface_page
from ..files import save_figure
from .cells import Cell
from .results import GREEK, MEASURES, option_columns, seed_means
from .spec import Sweep

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colour-blind safe (Okabe and Ito), without yellow, which is too faint for lines."""
MARKERS = "osD^vP*X"


def draw_all(sweep: Sweep, frame: pd.DataFrame, folder: Path) -> None:
    """Write every figure as .png and .pdf into a folder; ``frame`` is from ``results.results``."""
    numbers = seed_means(frame)
    if not _drawn(numbers):
        print("No cell has been validated, so no figure is drawn.")
        return
    save_figure(draw_noise(frame, numbers), folder / "noise-rates")
    names = option_columns(sweep)
    for name, method in sweep.methods.items():
        part = frame[frame["method"].eq(name)]
        options = [names[option] for option, values in method.vary.items() if len(values) > 1]
        if len(options) == 1 and _drawn(numbers[numbers["row"].isin(part["row"])]):
            figure = draw_option(part, numbers, options[0], method.label or name)
            save_figure(figure, folder / f"{name}-{options[0]}")


def draw_vnets(done: Sequence[Cell], folder: Path) -> None:
    """Write VNet's surfaces and weights, noise rates in columns, for one seed: ``METHOD-step-NNNNN``.

    The steps are those that all runs of a method have saved.
    """
    pages: dict[str, list[Cell]] = {}
    for cell in done:
        if steps_of(cell.folder):
            runs = pages.setdefault(re.sub(r"-noise[^-]+|-seed\d+$", "", cell.name), [])
            runs += [cell] if not runs or runs[0].seed == cell.seed else []
    for name, runs in pages.items():
        for step in sorted(set.intersection(*(set(steps_of(cell.folder)) for cell in runs))):
            output = folder / f"{name}-step-{step:05d}.png"
            write_surface_page([str(cell.folder) for cell in runs], str(output), step)


def draw_noise(frame: pd.DataFrame, numbers: pd.DataFrame) -> Figure:
    """Draw methods in rows, a panel per measure, and mean ± standard error per noise rate."""
    measures = _drawn(numbers)
    rows = frame.drop_duplicates("row").sort_values("bound", kind="stable")["row"].tolist()
    rates = sorted(frame["noise"].unique())
    figure, axes = _panels(len(measures), width=2.7, height=0.7 + 0.24 * len(rows), sharey=True)
    places = np.arange(len(rows))
    for axis, name in zip(axes, measures, strict=True):
        for i, rate in enumerate(rates):
            found = _at(numbers, name, rate).reindex(rows)
            beside = places + 0.24 * (i - (len(rates) - 1) / 2)
            style = _style(i, f"{rate:.0%}") | {"ls": "none", "elinewidth": 1}
            axis.errorbar(found["mean"], beside, xerr=found["stderr"], **style)
        axis.set_xlabel(MEASURES[name].heading)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.ticklabel_format(axis="x", style="plain", useOffset=False)  # an offset would be on the label
        axis.grid(axis="x", alpha=0.3)
        for place in places[::2]:
            axis.axhspan(place - 0.5, place + 0.5, color="0.95", zorder=0)
    axes[0].set_yticks(places, rows)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    _legend(figure, axes[0], _what(numbers))
    return figure


def draw_option(part: pd.DataFrame, numbers: pd.DataFrame, option: str, method: str) -> Figure:
    """Draw one method's measures over an option's values, a line per noise rate."""
    rows = part.drop_duplicates("row")
    numeric = pd.api.types.is_numeric_dtype(rows[option])
    places = rows[option] if numeric else range(len(rows))
    x = pd.Series(list(places), index=rows["row"])
    numbers = numbers[numbers["row"].isin(x.index)]
    measures = _drawn(numbers)
    figure, axes = _panels(len(measures), width=3.2, height=2.5)
    for axis, name in zip(axes, measures, strict=True):
        for i, rate in enumerate(sorted(part["noise"].unique())):
            found = _at(numbers, name, rate).reindex(x.sort_values().index)
            style = _style(i, f"{rate:.0%}") | {"capsize": 2}
            axis.errorbar(x[found.index], found["mean"], yerr=found["stderr"], **style)
        axis.set(xlabel=GREEK.get(option, option), ylabel=MEASURES[name].heading)
        if not numeric:
            axis.set_xticks(list(places), rows[option].astype(str), rotation=20, ha="right")
        axis.grid(alpha=0.3)
    _legend(figure, axes[0], f"{method}, {_what(numbers)}")
    return figure


def _what(numbers: pd.DataFrame) -> str:
    """Return the legend's title, in lines that fit over one panel."""
    error = "\nmean ± standard error over seeds" if numbers["seeds"].max() > 1 else ""
    return f"injected noise rate{error}"


def _at(numbers: pd.DataFrame, measure: str, rate: float) -> pd.DataFrame:
    return numbers[numbers["measure"].eq(measure) & numbers["noise"].eq(rate)].set_index("row")


def _style(place: int, label: str) -> dict[str, Any]:
    own = {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)]}
    return {**own, "ms": 4, "label": label}


def _drawn(numbers: pd.DataFrame) -> list[str]:
    """Measures with numbers, except the win rate: the win-score counts ties."""
    known = set(numbers["measure"])
    return [name for name in MEASURES if name in known and name != "win_rate"]


def _panels(count: int, width: float, height: float, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` axes, three in a line."""
    columns = min(3, count)
    lines = -(-count // columns)
    size = 0.8 + width * columns, 0.6 + height * lines
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(wspace=0.06))
    axes = figure.subplots(lines, columns, sharey=sharey, squeeze=False)
    for axis in axes.flat[count:]:
        axis.remove()
    return figure, list(axes.flat[:count])


def _legend(figure: Figure, axis: Axes, title: str) -> None:
    handles, labels = axis.get_legend_handles_labels()
    legend = figure.legend(
        handles, labels, title=title, loc="outside upper center", ncols=len(labels), frameon=False
    )
    legend.get_title().set_multialignment("center")
