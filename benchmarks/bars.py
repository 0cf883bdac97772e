"""Bars of measurements, for the benchmarks' figures."""

import statistics
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes


def bars(axis: Axes, values: Mapping[str, Sequence[float]], colors: Sequence[str], text: str) -> None:
    """Draw a row per name: a bar to the median, with ``text`` about it, and a line over the range."""
    for row, (found, color) in enumerate(zip(values.values(), colors, strict=True)):
        median = statistics.median(found)
        axis.barh(row, median, height=0.6, color=color)
        if len(found) > 1:
            axis.plot([min(found), max(found)], [row, row], color="black", lw=1.2)
        place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(text.format(median), (max(found), row), **place)
    axis.set_yticks(range(len(values)), list(values))
    axis.set_ylim(len(values) - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)
