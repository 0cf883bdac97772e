"""Weights against Theorem 1's optimum, and reliability diagrams, runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLUMNS = 4
"""Runs in a row."""
BLUE, ORANGE = "#0072B2", "#D55E00"
"""Of Okabe and Ito, which the colour-blind can tell apart."""
KINDS = {"eta": ("clean preference $\\eta$", BLUE, "o"), "noisy": ("noisy label", ORANGE, "s")}
"""Heading, colour and marker of each curve of a reliability diagram."""
TICKS = (0, 0.2, 0.4, 0.6, 0.8, 1)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Of the weights' log-ratio in each bin: two bands and the median."""
_MEDIANS = 20
"""Bins of the horizontal axis, of equal numbers of pairs."""


def draw_ratios(pairs: Sequence[pd.DataFrame], table: pd.DataFrame) -> Figure:
    """log g+/g- over Theorem 1's optimum, and below over u, beside the optimum for s = u.

    The lower panel is left out for weights that do not look at u.

    Args:
        pairs: of each run, as ``theory_measures.judged_pairs`` makes them.
        table: one row a run: ``label``, and what ``theory_measures.agreement`` returns.
    """
    figure, axes = _panels(len(pairs), 2)
    side = max(frame[name].abs().quantile(0.99) for frame in pairs for name in ("optimum", "log_ratio"))
    for frame, (_, row), (upper, lower) in zip(pairs, table.iterrows(), axes, strict=True):
        for axis, name in ((upper, "optimum"), (lower, "u")):
            _quantiles_on(axis, frame[name].to_numpy(), frame["log_ratio"].to_numpy())
            axis.set(xlim=(-side, side), ylim=(-side, side))
        upper.plot(
            [-side, side],
            [-side, side],
            "--",
            color="0.2",
            linewidth=1,
            label="Theorem 1 (below: for $s = u$)",
        )
        upper.set_title(row["label"], fontsize=10)
        upper.set(xlabel="optimal $\\log\\, g^+/g^-$ (nats)")
        told = f"$r$ = {row['pearson']:.2f}\n$\\rho$ = {row['spearman']:.2f}\nslope {row['slope']:.2f}"
        upper.text(0.04, 0.96, told, transform=upper.transAxes, va="top", fontsize=8)
        if np.isnan(row["slope_at_u"]):
            lower.remove()
            continue
        u, optimum = (np.concatenate([v, -v]) for v in frame[["u", "optimum_at_u"]].to_numpy().T)
        order = np.argsort(u)
        lower.plot(u[order], optimum[order], "--", color="0.2", linewidth=1)
        lower.set_xlabel("$u$ (nats)")
    for line in axes[::COLUMNS]:
        for axis in line:
            axis.set_ylabel("run's $\\log\\, g^+/g^-$ (nats)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return figure


def draw_reliability(tables: Sequence[pd.DataFrame], labels: Sequence[str], errors: pd.DataFrame) -> Figure:
    """The true probability, and that of a noisy label, over sigma(u) by tenths.

    Args:
        tables: of each run, as ``theory_measures.reliability`` makes them of ``eta`` and ``noisy``.
        labels: of the runs.
        errors: one row a run: ``ece_eta`` and ``ece_noisy``.
    """
    figure, axes = _panels(len(tables), 1)
    for table, label, (_, row), (axis,) in zip(tables, labels, errors.iterrows(), axes, strict=True):
        axis.plot([0, 1], [0, 1], "--", color="0.2", linewidth=1, label="calibrated")
        for name, (heading, color, marker) in KINDS.items():
            axis.plot(
                table["predicted"],
                table[name],
                label=heading,
                marker=marker,
                color=color,
                mec="white",
                markersize=5.5,
                linewidth=1.3,
            )
        axis.set(xlim=(0, 1), ylim=(0, 1), xticks=TICKS, yticks=TICKS)
        axis.set_xlabel("$\\sigma(u)$")
        axis.set_title(label, fontsize=10)
        told = f"ECE {row['ece_eta']:.3f} ($\\eta$)\nECE {row['ece_noisy']:.3f} (noisy)"
        axis.text(0.04, 0.96, told, transform=axis.transAxes, va="top", fontsize=8)
    for (axis,) in axes[::COLUMNS]:
        axis.set_ylabel("probability")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _quantiles_on(axis: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """Median and bands of y in bins of x, both in both orders."""
    x, y = np.concatenate([x, -x]), np.concatenate([y, -y])
    parts = np.array_split(np.argsort(x, kind="stable"), _MEDIANS)
    middle = [np.median(x[part]) for part in parts]
    outer, low, median, high, other = np.array([np.quantile(y[part], QUANTILES) for part in parts]).T
    axis.fill_between(middle, outer, other, color=BLUE, alpha=0.15, linewidth=0, label="90% of the pairs")
    axis.fill_between(middle, low, high, color=BLUE, alpha=0.3, linewidth=0, label="50%")
    axis.plot(middle, median, color=BLUE, linewidth=1.6, label="median")


def _panels(runs: int, rows: int) -> tuple[Figure, list[tuple[Axes, ...]]]:
    """A figure, and the axes of each run, one below the other."""
    columns, lines = min(COLUMNS, runs), -(-runs // COLUMNS)
    # A single run's legend still needs its width.
    figure = Figure(figsize=(max(0.6 + 2.4 * columns, 5), 0.4 + 2.6 * rows * lines), layout="constrained")
    grid = figure.subplots(rows * lines, columns, squeeze=False)
    for axis in grid.flat:
        axis.set_box_aspect(1)
        axis.grid(alpha=0.3)
    places = [divmod(place, columns) for place in range(columns * lines)]
    axes = [tuple(grid[rows * line + row][column] for row in range(rows)) for line, column in places]
    for axis in (axis for unused in axes[runs:] for axis in unused):
        axis.remove()
    return figure, axes[:runs]
