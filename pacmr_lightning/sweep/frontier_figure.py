"""Gold reward against KL, a line a method and a colour for what it is told, under the exact ceiling."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ..errors import UserError
from .figures import COLORS, MARKERS, save
from .results import MEASURES
from .spec import Frontier, Sweep

MANY = 14
"""Lines whose names do not fit beside the panels."""
MORE_COLORS = [color for place, color in enumerate(matplotlib.color_sequences["tab10"]) if place != 7]
"""Where ``COLORS`` are too few; without the grey, which bounds have."""
HIGHEST = 12.0
"""Nats beyond which no run is drawn, where methods are not compared there: policies that have gone that far
have lost their reward."""


def draw_frontier(sweep: Sweep, frontier: Frontier, frame: pd.DataFrame, measure: str, path: Path) -> None:
    """Writes the figure as .png and .pdf: a panel a noise rate, means over seeds with their standard errors.

    Args:
        sweep: gives labels.
        frontier: names the subject, and the file of the ceiling.
        frame: rows of ``results.results``.
        measure: what is drawn: the gold reward, or an accuracy where no run has one.
        path: without ending.

    Raises:
        UserError: there is no such ceiling, or it is one of gold rewards where another measure is drawn.
    """
    if frontier.ceiling and measure != "gold_reward":
        raise UserError(
            f"The ceiling {frontier.ceiling} has gold rewards, but no finished run has; take ceiling out of "
            "frontier, or add the callback GoldReward to trainer.callbacks."
        )
    rates = sorted(frame["noise"].unique())
    highest = max(HIGHEST, *frontier.kls)
    figure, axes = plt.subplots(
        1, len(rates), figsize=(1.6 + 3.6 * len(rates), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    known = [name for name in sweep.methods if frame["method"].eq(name).any()]
    blocks = list(dict.fromkeys(sweep.methods[name].told for name in known if not sweep.methods[name].bound))
    palette = COLORS if len(blocks) <= len(COLORS) else MORE_COLORS
    lines = []
    for axis, rate in zip(axes[0], rates, strict=True):
        if frontier.ceiling:
            _draw_ceiling(axis, _ceilings(frontier.ceiling, frame["seed"].unique()), highest)
        for name in known:
            part = frame[frame["method"].eq(name) & frame["noise"].eq(rate)]
            if part.empty or not sweep.methods[name].vary:
                continue
            groups = part.groupby("row")[["sequence_kl", measure]]
            line = groups.mean().join(groups.sem().add_suffix("_stderr")).sort_values("sequence_kl")
            line = line[line["sequence_kl"] <= highest]
            lines.append(line)
            method, is_subject = sweep.methods[name], name == frontier.subject
            block = [other for other in known if sweep.methods[other].told == method.told]
            axis.errorbar(
                line["sequence_kl"],
                line[measure],
                yerr=line[f"{measure}_stderr"],
                color="0.35" if method.bound else palette[blocks.index(method.told) % len(palette)],
                marker=MARKERS[block.index(name) % len(MARKERS)],
                ms=7 if is_subject else 4,
                lw=2.5 if is_subject else 0.8,
                ls=("-", "--", ":")[block.index(name) // len(MARKERS) % 3],
                elinewidth=0.8,
                zorder=3 if is_subject else 2,
                label=f"{method.label or name} ({method.told})",
            )
        axis.set(title=f"{rate:.0%} flipped", xscale="log", xlabel="sequence KL (nats)")
        axis.grid(alpha=0.3)
    drawn = pd.concat(lines) if lines else frame[:0]
    if len(drawn):
        low, high = drawn[measure].min(), drawn[measure].max()
        room = 0.1 if measure == "gold_reward" else 0.01
        axes[0, 0].set_ylim(low - room, high + 0.35 * (high - low) + room)
        axes[0, 0].set_xlim(max(0.02, 0.8 * drawn["sequence_kl"].min()), 1.2 * highest)
    for axis in axes[0, 1:]:
        axis.set_xlim(axes[0, 0].get_xlim())
    axes[0, 0].set_ylabel(MEASURES[measure].heading.lower())
    handles, labels = axes[0, 0].get_legend_handles_labels()
    seeds = frame["seed"].nunique()
    title = f"mean ± standard error, {seeds} seeds" if seeds > 1 else "one seed"
    many = len(labels) > MANY
    columns = len(rates) + 1 if many else 1
    if many:
        figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(labels) // columns))
    figure.legend(
        handles,
        labels,
        loc="outside lower center" if many else "outside right center",
        ncols=columns,
        frameon=False,
        fontsize=8,
        title=title,
    )
    save(figure, path)


def _ceilings(path: str, seeds: np.ndarray) -> list[pd.DataFrame]:
    found = []
    for seed in seeds:
        file = path.replace("{seed}", str(seed))
        try:
            found.append(pd.read_csv(file))
        except OSError:
            raise UserError(f"There is no ceiling {file}; pacmr ceiling writes such a file.") from None
    return found


def _draw_ceiling(axis: Axes, tables: list[pd.DataFrame], highest: float) -> None:
    """Means over worlds: at the same KLs of the best policies, and at the same n of the best of n."""
    kls = np.geomspace(0.02, highest, 200)
    lines = []
    for table in tables:
        part = table[table["curve"].eq("optimal")].sort_values("kl")
        lines.append(np.interp(kls, part["kl"], part["reward"], right=np.nan))
    axis.plot(kls, np.mean(lines, axis=0), color="black", lw=1.5, label="any policy (exact)")
    best = pd.concat(tables).query("curve == 'best of n' and parameter > 1")
    best = best.groupby("parameter")[["kl", "reward"]].mean()
    axis.plot(best["kl"], best["reward"], "k.:", lw=1, label="best of 2, 4, 8, ... (exact)")
