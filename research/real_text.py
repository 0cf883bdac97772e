"""Draws what real text has shown, of the runs in research/numbers.

python -m research.real_text --figure docs/real-text.png
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from pacmr_lightning.files import replacing

from . import run_command

NUMBERS = Path(__file__).parent / "numbers"
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
HH_METHODS = {
    "dpo": ("DPO, beta 0.1", "tab:blue", "o"),
    "dpo_further": ("DPO, beta 0.01", "tab:cyan", "o"),
    "pacmr": ("PACMR-DPO, beta 0.1", "tab:orange", "s"),
    "refined": ("refined by a probe, beta 0.1", "tab:red", "D"),
}
"""Labels, colors and markers of the runs on HH."""
HELD_OUT = 316
"""Pairs of HH that their accuracy is measured on."""


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


def accuracies(axis: Axes, runs: pd.DataFrame) -> None:
    """Accuracy on held-out pairs, by draw of the flips."""
    seeds = sorted(runs["seed"].unique())
    for place, (method, (label, color, marker)) in enumerate(HH_METHODS.items()):
        found = runs[runs["method"] == method].set_index("seed")["accuracy"].reindex(seeds)
        at = np.arange(len(seeds)) + 0.16 * (place - 1.5)
        error = np.sqrt(found * (1 - found) / HELD_OUT)
        axis.errorbar(at, found, error, fmt=marker, color=color, markersize=6, lw=1, label=label)
    axis.axhline(0.5, color="black", lw=1, ls="--", label="chance")
    axis.set_xticks(range(len(seeds)), [f"seed {seed}" for seed in seeds])
    axis.set_ylim(0.47, 0.76)
    axis.set_ylabel(f"accuracy ({HELD_OUT} held-out pairs)")
    axis.set_title("HH, 30% of labels flipped")
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def real_text(*, figure: str) -> None:
    """Draw what the runs on real text have shown.

    Args:
        figure: PNG to write.
    """
    runs = pd.read_csv(NUMBERS / "sentiment.csv")
    drawing, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    ranks(axes[0], pd.read_csv(NUMBERS / "judges.csv"))
    accuracies(axes[1], pd.read_csv(NUMBERS / "hh.csv"))
    rewards(axes[2], runs[np.isclose(runs["learning_rate"], 5e-4)])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    with replacing(figure) as temporary:
        drawing.savefig(temporary, dpi=150, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m research.real_text --figure FILE``."""
    run_command("real_text", real_text, arguments)


if __name__ == "__main__":
    main()
