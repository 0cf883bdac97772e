"""AUROC of linear probes for injected label noise by size of the base model, from the kept numbers.

python -m research.probe_sizes --figure research/notebook/probe-sizes.png
"""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from . import command, write_png

NUMBERS = Path(__file__).parent / "numbers" / "probe-sizes.csv"
"""Rows of ``research.probe --output`` of each model and data set."""
MILLIONS = {"smollm2-135m": 135, "gemma-3-270m": 268, "qwen2.5-coder-0.5b": 494, "qwen2.5-coder-1.5b": 1544}
"""Parameters."""
COLORS = {0.2: "#0072B2", 0.3: "#009E73", 0.4: "#D55E00"}


def probe_sizes(*, figure: str) -> None:
    """Draw AUROC by size, data and noise rate, with standard deviations over the draws.

    Args:
        figure: PNG to draw to.
    """
    runs = pd.read_csv(NUMBERS)
    panels = list(runs.groupby("data"))
    drawing, axes = plt.subplots(
        1, len(panels), figsize=(3.4 * len(panels), 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (data, of_data) in zip(axes[0], panels, strict=True):
        most = of_data[of_data["pairs"] == of_data["pairs"].max()]
        for i, (share, part) in enumerate(most.groupby("flips")):
            size = part["model"].map(MILLIONS)
            means = part.groupby(size)["auroc"].agg(["mean", "std"])
            sizes = means.index * 1.03 ** (i - 1)  # side by side
            axis.errorbar(sizes, means["mean"], means["std"], color=COLORS[share], marker="o", capsize=3)
            if axis is axes[0, -1]:
                place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
                end = sizes[-1], means["mean"].iloc[-1]
                axis.annotate(f"{share:.0%} noise", end, color=COLORS[share], **place)
        axis.axhline(0.5, color="0.6", linewidth=1, linestyle=":")
        present = sorted(most["model"].map(MILLIONS).unique())
        axis.set(title=f"{data}, {most['pairs'].iloc[0]} pairs", xlabel="parameters (millions)", xscale="log")
        axis.set_xticks(present, [f"{n:,}" for n in present])
        axis.set_xlim(present[0] * 0.8, present[-1] * 2)
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("AUROC for injected label noise")
    write_png(drawing, figure, 160)


main = command("probe_sizes", probe_sizes)

if __name__ == "__main__":
    main()
