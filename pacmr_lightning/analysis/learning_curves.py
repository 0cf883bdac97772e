"""Figure of several runs: reward or margin, accuracy, and weights of pairs."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ..batch import UNKNOWN
from ..errors import UserError
from ..files import local_path, replacing
from ..runs.folder import METRICS, read_summary, read_weights, weight_parts
from .distribution_figure import BINS, GROUPS, weights_by_flip

CURVES = (
    ("val/rewards/accuracies", "Accuracy on validation pairs"),
    ("val/rewards/margins", "Reward margin $u$ on validation pairs"),
)
REWARD, KL = "val/gold_reward", "val/sequence_kl"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "black")
"""Colours of the first five runs (Okabe and Ito); further runs are grey."""
LAST = 2000
"""Final visits whose weights are drawn, in whole steps."""


def draw_learning_curves(runs: list[str], path: str) -> None:
    """Draw reward against KL (without rewards: reward margins), accuracy, and recorded last weights.

    UserError if a run was not validated, or ``path`` ends in neither .png nor .pdf.
    """
    if Path(path).suffix not in (".png", ".pdf"):
        raise UserError(f"The figure's file is {path}, but its name must end in .png or .pdf.")
    summaries = [read_summary(run) for run in runs]
    names = [summary["method"] for summary in summaries]
    colors = [COLORS[i] if i < len(COLORS) else "0.6" for i in range(len(runs))]
    metrics = [_metrics(run) for run in runs]
    for run, curves in zip(runs, metrics, strict=True):
        if missing := [column for column, _ in CURVES if column not in curves]:
            raise UserError(f"The run {run} was not validated, so it has no {missing[0]}; leave it out.")
    rewarded = all({REWARD, KL} <= set(summary["metrics"]) for summary in summaries)
    weighted = [run for run in runs if weight_parts(run) and read_summary(run)["flip_auroc"] is not None]
    panels = 3 if weighted else 2
    figure, axes = plt.subplots(1, panels, figsize=(3 * panels, 3.2), layout="constrained")
    if rewarded:
        _draw_rewards(axes[0], [summary["metrics"] for summary in summaries], names, colors)
    else:
        _draw_curves(axes[0], *CURVES[1], metrics, names, colors)
    _draw_curves(axes[1], *CURVES[0], metrics, names, colors)
    if weighted:
        _draw_weights(axes[2], weighted)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8.5)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=200, format=Path(path).suffix[1:])
    plt.close(figure)


def _draw_rewards(axis: Axes, metrics: list[dict[str, float]], names: list[str], colors: list[str]) -> None:
    """Draw gold reward ± standard error against KL, a labelled point per run."""
    widest = max(found[KL] for found in metrics) or 1
    for found, name, color in zip(metrics, names, colors, strict=True):
        error = found.get(f"{REWARD}_stderr", 0)
        axis.errorbar(found[KL], found[REWARD], error, fmt="o", color=color, ms=6, capsize=2)
        axis.text(found[KL] + 0.08 * widest, found[REWARD], name, color=color, va="center", size=9)
    axis.set_xlim(0, 1.55 * widest)
    axis.margins(y=0.15)
    axis.set(xlabel="KL to the reference (nats)", ylabel="Gold reward of sampled responses")


def _draw_curves(
    axis: Axes, column: str, label: str, metrics: list[pd.DataFrame], names: list[str], colors: list[str]
) -> None:
    """Draw a column of the runs' curves over policy updates, with each run's name at its end."""
    curves = [found.dropna(subset=[column]) for found in metrics]
    for points, color in zip(curves, colors, strict=True):
        axis.plot(points["step"] + 1, points[column], marker="o", ms=3, color=color)
    low, high = axis.get_ylim()
    # Names that would overlap move up.
    at = -np.inf
    for i in sorted(range(len(curves)), key=lambda i: curves[i][column].iloc[-1]):
        at = max(curves[i][column].iloc[-1], at + 0.07 * (high - low))
        axis.text(
            1.02, at, names[i], color=colors[i], transform=axis.get_yaxis_transform(), va="center", size=9
        )
    axis.set(xlabel="Policy updates", ylabel=label, ylim=(low, high))
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _draw_weights(axis: Axes, runs: list[str]) -> None:
    """Draw densities of each run's last weights: unflipped pairs upwards, flipped pairs downwards."""
    for row, run in enumerate(runs):
        rows = read_weights(run, last=LAST)
        flipped = rows["flipped"].astype("Int8").fillna(UNKNOWN).to_numpy(np.int8)
        groups = weights_by_flip(rows["weight"].to_numpy(), flipped)
        densities = {name: np.histogram(values, BINS, density=True)[0] for name, values in groups.items()}
        tallest = max(density.max() for density in densities.values())
        for name, density in densities.items():
            color = GROUPS.get(name, GROUPS["unflipped"])[1]
            heights = (-0.42 if name == "flipped" else 0.42) * density / tallest
            axis.stairs(heights - row, BINS, baseline=-row, fill=True, color=color, alpha=0.6)
            side, mean = -1 if name == "flipped" else 1, groups[name].mean(dtype=float)
            axis.text(0.5, side * 0.27 - row, f"{name}: mean {mean:.2f}", color=color, ha="center", size=9)
        axis.axhline(-row, color="0.3", lw=0.8)
    axis.set(xlim=(0, 1), xlabel="Weight $g$ of the last pairs", ylim=(0.5 - len(runs), 0.5))
    axis.set_yticks([-row for row in range(len(runs))], [read_summary(run)["method"] for run in runs])


def validated(run: str) -> bool:
    """Return true if a run has curves to draw."""
    return (local_path(run) / METRICS).exists() and {column for column, _ in CURVES} <= set(_metrics(run))


def _metrics(run: str) -> pd.DataFrame:
    path = local_path(run) / METRICS
    if not path.exists():
        raise UserError(f"{path} does not exist; name the folder of a run that logged to it.")
    return pd.read_csv(path)
