"""Runs on real text in one figure, from the kept runs.

python -m research.real_text --figure docs/real-text.png
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from pacmr_lightning.sweep.figures import COLORS

from . import command, write_png

BLUE, ORANGE, GREEN, PINK, _, SKY, _ = COLORS
NUMBERS = Path(__file__).parent / "numbers"
METHODS = {
    "dpo": ("DPO, beta 0.03", BLUE, "o", (2.1, 1.72)),
    "dpo_furthest": ("DPO, beta 0.003", SKY, "s", (2.2, 3.3)),
    "dpo_two_epochs": ("DPO, beta 0.003,\ntwo epochs", GREEN, "D", (26, 2.35)),
    "pacmr": ("PACMR-DPO", ORANGE, "^", (13.2, 3.07)),
    "refined": ("refined", PINK, "v", (21.5, 4.15)),
}
"""Label, color, marker and place of the label of each method on film reviews."""
REFERENCE = 1.0
"""Reward of the base model's continuations of film reviews."""
SCORERS = {
    "probe": ("linear probe of the base model", GREEN, "D"),
    "pre_update": ("policy, pre-update score", ORANGE, "^"),
    "policy": ("trained policy", BLUE, "o"),
}
"""Label, color and marker of each scorer."""


def rewards(axis: Axes, runs: pd.DataFrame) -> None:
    """Draw reward against KL, one point per run."""
    for method, (label, color, marker, place) in METHODS.items():
        found = runs[runs["method"] == method]
        points = [found[name] for name in ("sequence_kl", "reward", "reward_stderr")]
        axis.errorbar(*points, fmt=marker, color=color, ms=6, lw=1)
        axis.annotate(label, place, color=color, fontsize=9)
    axis.axhline(REFERENCE, color="black", lw=1, ls="--")
    axis.annotate("base model", (2.1, REFERENCE + 0.06), fontsize=9)
    axis.set(xscale="log", xticks=[3, 5, 10, 20, 50], xlim=(2, 110), ylim=(0.8, 4.5))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.minorticks_off()
    axis.set(xlabel="KL to the base model (nats)", ylabel="reward (summed VADER valence)")
    axis.set_title("Film reviews, 30% label noise, one point per seed", fontsize=10)


def ranks(axis: Axes, scores: pd.DataFrame) -> None:
    """Draw the AUROC of each scorer for injected label noise, by data set."""
    data = list(dict.fromkeys(scores["data"]))
    for place, (scorer, (label, color, marker)) in enumerate(SCORERS.items()):
        found = scores[scores["judge"] == scorer].set_index("data").reindex(data)
        at = np.arange(len(data)) + 0.12 * (place - 1)
        axis.errorbar(at, found["auroc"], found["stderr"], fmt=marker, color=color, ms=6, lw=1, capsize=2)
        axis.annotate(label, (0.35, 0.755 - 0.018 * place), color=color, fontsize=9)
    axis.axhline(0.5, color="black", lw=1, ls="--")
    axis.annotate("chance", (-0.35, 0.503), fontsize=9)
    sizes = scores.groupby("data")["pairs"].first()
    axis.set_xticks(range(len(data)), [f"{name}\n{sizes[name]:,} pairs" for name in data])
    axis.set(xlim=(-0.4, len(data) - 0.5), ylim=(0.48, 0.78), ylabel="AUROC for injected label noise")
    axis.set_title("Ranking of label errors, 30% label noise", fontsize=10)


def real_text(*, figure: str) -> None:
    """Draw the scorers' AUROC on three data sets, and reward against KL on film reviews.

    Args:
        figure: PNG to write.
    """
    runs = pd.read_csv(NUMBERS / "sentiment.csv")
    drawing, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    ranks(axes[0], pd.read_csv(NUMBERS / "judges.csv"))
    rewards(axes[1], runs[np.isclose(runs["learning_rate"], 5e-4)])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    write_png(drawing, figure, 200)


main = command("real_text", real_text)

if __name__ == "__main__":
    main()
