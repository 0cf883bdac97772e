"""Figure of pseudo-label quality against coverage."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..files import save_figure

LEAST = 30
"""Minimum number of retained pairs in a curve."""
PANELS = {"clean_accuracy": "Clean accuracy (%)", "direction_agreement": "Direction agreement (%)"}
LONG = 25
"""Characters above which labels stand below each other."""
MARKERS = "osD^vP*X"


def draw_consistency(curves: dict[str, pd.DataFrame], taus: Sequence[float], path: Path) -> None:
    """Draw accuracy and agreement over coverage, for rising thresholds, marked at ``taus``.

    ``curves`` are rows of ``consistency_by_threshold`` by label; ``path`` has no ending.
    """
    labels = {
        name: name if curve["retained"].ge(LEAST).any() else f"{name} (not drawn: under {LEAST} pairs)"
        for name, curve in curves.items()
    }
    figure, axes = plt.subplots(1, len(PANELS), figsize=(7.2, 3.4), layout="constrained")
    marked = dict(zip(taus, cycle(MARKERS), strict=False))
    for axis, (name, heading) in zip(axes, PANELS.items(), strict=True):
        for i, curve in enumerate(curves.values()):
            color = f"C{i}"
            shown = curve[curve["retained"] >= LEAST]
            x, y = 100 * shown["coverage"], 100 * shown[name]
            error = 100 * shown[f"{name}_stderr"]
            low, high = ((y + sign * error).clip(0, 100) for sign in (-1, 1))
            axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
            axis.plot(x, y, color=color, linewidth=1.4)
            for tau, marker in marked.items():
                point = shown["tau"].eq(tau)
                axis.plot(x[point], y[point], marker, color=color, markersize=5.5, mec="white", zorder=3)
        axis.set(xlabel="Coverage (%)", ylabel=heading, xlim=(0, 101))
        if not any(len(line.get_xdata()) for line in axis.lines):
            axis.set_ylim(0, 100)
        axis.grid(alpha=0.3)
    runs = [Line2D([], [], color=f"C{i}", label=label) for i, label in enumerate(labels.values())]
    marks = [
        Line2D([], [], marker=marker, color="0.35", linestyle="none", label=f"τ = {tau:g}")
        for tau, marker in marked.items()
    ]
    band = Patch(color="0.35", alpha=0.2, linewidth=0, label="± 1 standard error")
    columns = min(len(runs), 3) if max(map(len, labels.values())) <= LONG else 1
    figure.legend(handles=runs, loc="outside upper center", ncols=columns, frameon=False)
    figure.legend(handles=[*marks, band], loc="outside lower center", ncols=5, frameon=False)
    save_figure(figure, path)
    plt.close(figure)
