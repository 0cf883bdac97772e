"""Figures of weight distributions by label, and of weights as detectors of flips."""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..batch import UNKNOWN
from ..modules.metrics import weight_gap

BINS = np.linspace(0, 1, 31).tolist()
GROUPS = {"unflipped": (0, "#0072B2"), "flipped": (1, "#D55E00"), "unknown": (UNKNOWN, "0.5")}
"""Value of ``flipped`` and colour of each distribution (Okabe and Ito)."""
SCORES = {"low_weight": "black", "low_u": "#0072B2"}
"""Colour of each score of flips."""


def weights_by_flip(weight: np.ndarray, flipped: np.ndarray) -> dict[str, np.ndarray]:
    """Split (N,) weights by ``flipped`` (1, 0, or -1 for unknown); "all" if all are unknown."""
    if (flipped == UNKNOWN).all():
        return {"all": weight}
    groups = {name: weight[flipped == value] for name, (value, _) in GROUPS.items()}
    return {name: values for name, values in groups.items() if len(values)}


def draw_on(axis: Axes, weight: np.ndarray, flipped: np.ndarray) -> None:
    """Draw densities of (N,) weights by label, with a dashed line at each mean."""
    groups = weights_by_flip(weight, flipped)
    means = []
    for name, values in groups.items():
        color, mean = GROUPS.get(name, GROUPS["unflipped"])[1], values.mean(dtype=float)
        label = f"{name} ({len(values):,}), mean {mean:.2f}"
        axis.hist(values, BINS, density=True, color=color, alpha=0.5, label=label)
        means.append((mean, color))
    top = axis.get_ylim()[1]
    for mean, color in means:
        axis.vlines(mean, 0, top, color=color, linestyle="--", linewidth=1.4)
    axis.set(xlabel="Weight $g$", ylabel="Density", xlim=(0, 1))
    axis.set_ylim(0, (1.25 + 0.13 * len(groups)) * top)  # room for the legend
    gap = weight_gap(torch.tensor(weight), torch.tensor(flipped))["gap"]
    title = None if gap is None else f"gap {gap:.2f}"
    fonts = {"fontsize": 9, "title_fontsize": 9}
    axis.legend(title=title, frameon=False, loc="upper left", borderaxespad=0.2, alignment="left", **fonts)


def draw_weight_distributions(weight: np.ndarray, flipped: np.ndarray, step: int) -> Figure:
    """Draw the figure of (N,) weights of pairs visited up to policy update ``step``."""
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axis = figure.add_subplot()
    draw_on(axis, weight, flipped)
    axis.set_title(f"Last {len(weight):,} pairs to step {step:,}", fontsize=10)
    return figure


def draw_precision_recall(labels: np.ndarray, scores: dict[str, np.ndarray]) -> Figure:
    """Draw precision over recall of (N,) ``scores`` of the N ``labels``, of which some are true."""
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axis = figure.add_subplot(xlim=(0, 1), ylim=(0, 1.05), xlabel="Recall of flips", ylabel="Precision")
    for name, values in scores.items():
        found = np.cumsum(labels[np.argsort(-values, kind="stable")])
        precision = found / np.arange(1, len(found) + 1)
        axis.plot(found / found[-1], precision, color=SCORES[name], label=name.replace("_", " "))
    axis.legend(frameon=False, fontsize=9)
    return figure
