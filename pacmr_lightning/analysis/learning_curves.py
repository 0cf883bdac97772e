"""How several runs learned, in one figure."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from ..errors import UserError
from ..files import replacing
from ..runs.folder import METRICS, read_weights, weight_parts
from ..runs.summary import read_summary

CURVES = (
    ("val/rewards/accuracies", "accuracy on validation pairs"),
    ("val/rewards/margins", "reward margin u on validation pairs"),
)
"""Columns of a run's metrics that are drawn, and what their axes say."""
LAST = 2000
"""Visits at the end of a run whose weights are drawn."""


def draw(runs: list[str], path: str) -> None:
    """Draws validation accuracy and reward margin over updates, and the last weights by label, if recorded.

    Args:
        runs: folders of finished runs.
        path: .png or .pdf file to write.

    Raises:
        UserError: a run's files are missing, or the file has another ending.
    """
    if Path(path).suffix not in (".png", ".pdf"):
        raise UserError(f"The figure's file is {path}, but its name must end in .png or .pdf.")
    weighted = [run for run in runs if weight_parts(run) and read_summary(run)["flip_auroc"] is not None]
    figure, axes = plt.subplots(
        1, 2 + len(weighted), figsize=(3.6 * (2 + len(weighted)), 3.2), layout="constrained"
    )
    for axis, (column, label) in zip(axes, CURVES, strict=False):
        for run in runs:
            metrics = _metrics(run)
            points = metrics.dropna(subset=[column])
            axis.plot(points["step"] + 1, points[column], marker="o", ms=3, label=read_summary(run)["method"])
        axis.set(xlabel="policy updates", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)  # the same colors in both
    for axis, run in zip(axes[2:], weighted, strict=True):
        summary = read_summary(run)
        rows = read_weights(run).tail(LAST)
        bins = np.linspace(0, 1, 26)
        for flipped, label, color in ((False, "unflipped", "tab:blue"), (True, "flipped", "tab:red")):
            part = rows.loc[rows["flipped"].eq(flipped).fillna(False), "weight"]
            axis.hist(part, bins, density=True, alpha=0.55, color=color, label=f"{label} ({len(part):,})")
        axis.set(xlabel="weight g", ylabel="density", xlim=(0, 1))
        axis.set_title(f"{summary['method']}: last {len(rows):,} pairs", fontsize=10)
        axis.set_ylim(top=1.25 * axis.get_ylim()[1])  # room for the legend
        axis.legend(frameon=False, loc="upper center", ncols=2, fontsize=9)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format=Path(path).suffix[1:])
    plt.close(figure)


def validated(run: str) -> bool:
    """Whether a run has curves to draw."""
    path = Path(run) / METRICS
    return path.exists() and {column for column, _ in CURVES} <= set(pd.read_csv(path, nrows=0).columns)


def _metrics(run: str) -> pd.DataFrame:
    path = Path(run) / METRICS
    if not path.exists():
        raise UserError(f"{path} does not exist; name the folder of a run that logged to it.")
    return pd.read_csv(path)
