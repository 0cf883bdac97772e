"""Draws what real text has shown, of the runs in docs/numbers.

python benchmarks/real_text.py --figure docs/real-text.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

NUMBERS = Path(__file__).parents[1] / "docs" / "numbers"
METHODS = {
    "dpo": ("DPO, beta 0.03", "tab:blue", "o"),
    "dpo_furthest": ("DPO, beta 0.003", "tab:cyan", "o"),
    "dpo_two_epochs": ("the same, two epochs", "tab:cyan", "X"),
    "pacmr": ("PACMR-DPO, beta 0.03", "tab:orange", "s"),
    "refined": ("refined, beta 0.03", "tab:red", "D"),
}
"""Labels, colors and markers of the runs on film reviews."""
REFERENCE = 1.0
"""Reward of the untouched model's continuations of film reviews."""
JUDGES = {
    "probe": ("linear probe of the untouched model", "tab:green"),
    "first_visit": ("policy, before it learned from the pair", "tab:purple"),
    "policy": ("policy, after training", "tab:gray"),
}
"""Labels and colors of those who rank the labels."""


def rewards(axis: Axes, runs: pd.DataFrame) -> None:
    """Reward against KL, a point a run."""
    for method, (label, color, marker) in METHODS.items():
        found = runs[runs["method"] == method]
        axis.errorbar(
            found["sequence_kl"],
            found["reward"],
            found["reward_stderr"],
            fmt=marker,
            color=color,
            markersize=6,
            lw=1,
            label=label,
        )
    axis.axhline(REFERENCE, color="black", lw=1, ls="--", label="untouched model")
    axis.set_xscale("log")
    axis.set_xticks([3, 5, 10, 20, 50])
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.minorticks_off()
    axis.set_xlabel("KL of responses to the untouched model (nats)")
    axis.set_ylabel("reward (summed VADER valence)")
    axis.set_title("Film reviews, 30% of labels flipped, a point a seed")
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    axis.set_ylim(0.8, 5.6)


def ranks(axis: Axes, judges: pd.DataFrame) -> None:
    """AUROC of each judge for planted flips, by data."""
    data = list(dict.fromkeys(judges["data"]))
    for place, (judge, (label, color)) in enumerate(JUDGES.items()):
        found = judges[judges["judge"] == judge].set_index("data").reindex(data)
        at = np.arange(len(data)) + 0.27 * (place - 1)
        axis.bar(at, found["auroc"] - 0.5, 0.25, 0.5, color=color, label=label)
        axis.errorbar(at, found["auroc"], found["stderr"], fmt="none", color="black", lw=1, capsize=2)
    sizes = judges.groupby("data")["pairs"].first()
    axis.set_xticks(range(len(data)), [f"{name}\n{sizes[name]:,} pairs" for name in data])
    axis.set_ylim(0.48, 0.82)
    axis.set_ylabel("AUROC for planted flips (0.5: chance)")
    axis.set_title("Who finds flipped labels, 30% of them")
    axis.legend(frameon=False, fontsize=8, loc="upper right")


def main() -> None:
    """Reads the runs and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", required=True, help="PNG to write")
    options = parser.parse_args()
    runs = pd.read_csv(NUMBERS / "sentiment.csv")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    rewards(left, runs[np.isclose(runs["learning_rate"], 5e-4)])
    ranks(right, pd.read_csv(NUMBERS / "judges.csv"))
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.figure, dpi=150)


if __name__ == "__main__":
    main()
