"""Wins, ties and losses of one model against another as one bar."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from .win_rate import Estimate, WinRate

COLORS = ("#0072B2", "0.82", "#D55E00")
"""Of wins, ties and losses; the outer two by Okabe and Ito."""


def draw(result: WinRate, files: tuple[str, str], judge: str) -> Figure:
    """The bar, with the 95% intervals of the shares of wins and losses at its two inner ends.

    Args:
        result: of A against B.
        files: of A and B, whose names stand in the title.
        judge: its name.
    """
    figure = Figure(figsize=(6.4, 2.4), layout="constrained")
    axis = figure.add_subplot()
    shares = (result.win_rate, result.tie_rate, result.loss_rate)
    start = 0.0
    for share, color, label in zip(shares, COLORS, ("A wins", "tie", "B wins"), strict=True):
        axis.barh(0, 100 * share.value, left=start, color=color, height=0.6, label=label)
        if share.value > 0.06:  # room for the number
            text = "black" if color == COLORS[1] else "white"
            axis.text(
                start + 50 * share.value, 0.12, f"{share.value:.1%}", color=text, ha="center", va="center"
            )
        start += 100 * share.value
    for share, from_right in ((result.win_rate, False), (result.loss_rate, True)):
        at, low, high = _ends(share, from_right)
        axis.errorbar(at, -0.16, xerr=[[at - low], [high - at]], color="black", capsize=3, linewidth=1.2)
    score = result.win_score
    # Most files are called generations.jsonl, in a folder that is called as the run.
    first, second = (Path(*Path(file).parts[-2:]) for file in files)
    axis.set_title(
        f"A: {first}   B: {second}\n"
        f"win-score {score.value:.3f} ({score.low:.3f} to {score.high:.3f}), {result.pairs:,} pairs, "
        f"judge {judge}",
        fontsize=9,
        parse_math=False,
    )
    axis.set(xlim=(0, 100), ylim=(-0.4, 0.4), yticks=[], xlabel="Share of pairs (%), with 95% intervals")
    for side in ("left", "right", "top"):
        axis.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _ends(share: Estimate, from_right: bool) -> tuple[float, float, float]:
    """The share and its interval as places on the axis, from low to high."""
    if from_right:
        return 100 - 100 * share.value, 100 - 100 * share.high, 100 - 100 * share.low
    return 100 * share.value, 100 * share.low, 100 * share.high
