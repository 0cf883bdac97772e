"""Gold reward against noise rate on ten held-out seeds of the synthetic benchmark, from the kept runs.

python -m research.told_share --figure research/notebook/told-share.png

``research/sweeps/told_share.yaml`` makes such runs on the tuning seeds, with assumed noise rates.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pacmr_lightning.files import replacing
from pacmr_lightning.sweep.figures import COLORS, MARKERS

from . import command
from .frontier import label_ends

NUMBERS = Path(__file__).parent / "numbers"
METHODS = {
    "first": "DPO, one epoch, beta 1",
    "pacmr": "PACMR-DPO, beta 2",
    "dpo_two_epochs": "DPO, two epochs, tuned beta",
    "estimated": "Refined, beta 1",
}
"""Labels of the methods, by their names in research/numbers."""
TUNED = {0.0: 1.0, 0.1: 1.0, 0.2: 0.5, 0.3: 0.2, 0.4: 0.1, 0.45: 0.1}
"""Betas of two epochs of DPO, by noise rate: those with the highest gold reward on the tuning seeds."""


def held_out_runs() -> pd.DataFrame:
    """Return the runs of ``METHODS`` on the ten held-out seeds, two epochs at the beta of ``TUNED`` only.

    Returns:
        One row per run: ``method``, ``noise`` (0 to 0.45), ``seed``, ``gold_reward``, ``sequence_kl``, ...
    """
    frontier, rest, kinds = (
        pd.read_csv(NUMBERS / f"{name}.csv")
        for name in ("frontier-report", "told-nothing-report", "noise-kinds-report")
    )
    clean = kinds[kinds["method"].str.endswith("_clean")]
    clean = clean.assign(method=clean["method"].str.removesuffix("_clean"), noise=0.0)
    runs = pd.concat([clean, rest, frontier])
    tuned = np.isclose(runs["beta"], runs["noise"].map(TUNED)) | (runs["method"] != "dpo_two_epochs")
    return runs[runs["method"].isin(METHODS) & tuned].reset_index(drop=True)


def told_share(*, figure: str) -> None:
    """Draw mean gold reward against noise rate, with standard errors over the ten held-out seeds.

    Args:
        figure: PNG to write.
    """
    runs = held_out_runs()
    drawing, axis = plt.subplots(figsize=(9, 4))
    ends = {}
    for (method, label), color, marker in zip(METHODS.items(), COLORS, MARKERS, strict=False):
        part = runs[runs["method"] == method].groupby("noise")["gold_reward"].agg(["mean", "sem"])
        x = 100 * part.index.to_numpy()
        axis.errorbar(x, part["mean"], part["sem"], color=color, marker=marker, ms=5, lw=1.6, capsize=2)
        ends[label] = (x[-1], part["mean"].iloc[-1], color)
    axis.set(xlabel="noise rate (%)", ylabel="gold reward", title="Ten held-out seeds, mean ± standard error")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    drawing.tight_layout(rect=(0, 0, 0.76, 1))
    label_ends(axis, ends)
    with replacing(figure) as temporary:
        drawing.savefig(temporary, dpi=200, format="png")


main = command("told_share", told_share)

if __name__ == "__main__":
    main()
