"""Figure of the learning curves of several runs."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from ..batch import UNKNOWN
from ..errors import UserError
from ..files import replacing
from ..runs.folder import METRICS, read_summary, read_weights, weight_parts
from .distribution_figure import draw_on

CURVES = (
    ("val/rewards/accuracies", "Accuracy on validation pairs"),
    ("val/rewards/margins", "Reward margin $u$ on validation pairs"),
)
LAST = 2000
"""Final visits whose weights are drawn, in whole steps."""


def draw_learning_curves(runs: list[str], path: str) -> None:
    """Draw validation accuracy and reward margin of finished runs, and the last weights if recorded."""
    if Path(path).suffix not in (".png", ".pdf"):
        raise UserError(f"The figure's file is {path}, but its name must end in .png or .pdf.")
    weighted = [run for run in runs if weight_parts(run) and read_summary(run)["flip_auroc"] is not None]
    figure, axes = plt.subplots(
        1, 2 + len(weighted), figsize=(3.6 * (2 + len(weighted)), 3.2), layout="constrained"
    )
    for axis, (column, label) in zip(axes, CURVES, strict=False):
        for run in runs:
            metrics = _metrics(run)
            if column not in metrics:
                raise UserError(f"The run {run} was not validated, so it has no {column}; leave it out.")
            points = metrics.dropna(subset=[column])
            axis.plot(points["step"] + 1, points[column], marker="o", ms=3, label=read_summary(run)["method"])
        axis.set(xlabel="Policy updates", ylabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)  # the same colors in both
    for axis, run in zip(axes[2:], weighted, strict=True):
        summary = read_summary(run)
        rows = read_weights(run, last=LAST)
        flipped = rows["flipped"].astype("Int8").fillna(UNKNOWN).to_numpy(np.int8)
        draw_on(axis, rows["weight"].to_numpy(), flipped)
        axis.set_title(f"{summary['method']}: last {len(rows):,} pairs", fontsize=10)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format=Path(path).suffix[1:])
    plt.close(figure)


def validated(run: str) -> bool:
    """Return true if a run has curves to draw."""
    return (Path(run) / METRICS).exists() and {column for column, _ in CURVES} <= set(_metrics(run))


def _metrics(run: str) -> pd.DataFrame:
    path = Path(run) / METRICS
    if not path.exists():
        raise UserError(f"{path} does not exist; name the folder of a run that logged to it.")
    return pd.read_csv(path)
