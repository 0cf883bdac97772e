"""A measure over the share of flipped labels: which settings suit which share.

pacmr sweep research/sweeps/told_share.yaml
python -m research.told_share research/sweeps/told_share.yaml --output docs/told-share
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from pacmr_lightning.errors import UserError
from pacmr_lightning.sweep.cells import cells
from pacmr_lightning.sweep.figures import save_png_and_pdf
from pacmr_lightning.sweep.results import GREEK, MEASURES, option_columns, results, seed_means
from pacmr_lightning.sweep.spec import Sweep, read_sweep
from pacmr_lightning.sweep.state import state_of

from . import run_command


def told_share(file: str, *, output: str) -> None:
    """Draw the gold reward of a finished sweep over its noise rates (validation accuracy without rewards).

    Args:
        file: sweep file, whose cells ``pacmr sweep`` has run.
        output: figure to write, without .png and .pdf.
    """
    sweep = read_sweep(file)
    done = [cell for cell in cells(sweep) if state_of(cell) == "done"]
    if not done:
        raise UserError(f"No cell of {file} has finished; run pacmr sweep {file} first.")
    frame = results(sweep, done)
    save_png_and_pdf(draw_rates(sweep, frame, seed_means(frame)), Path(output))


def draw_rates(sweep: Sweep, frame: pd.DataFrame, numbers: pd.DataFrame) -> Figure:
    """A panel for each method that varies an option, a line for each value; one for all other methods.

    Args:
        sweep: says which methods vary what.
        frame: rows of ``results.results``.
        numbers: their ``means``.
    """
    name = "gold_reward" if frame["gold_reward"].notna().any() else "val_accuracy"
    numbers = numbers[numbers["measure"].eq(name)]
    names = option_columns(sweep)
    varied = {
        method: names[option]
        for method, settings in sweep.methods.items()
        for option, values in settings.vary.items()
        if len(values) > 1 and len(settings.vary) == 1
    }
    panels: list[tuple[str, str | None, pd.DataFrame]] = [
        (sweep.methods[method].label or method, option, part)
        for method, option in varied.items()
        if len(part := frame[frame["method"].eq(method)])
    ]
    if len(rest := frame[~frame["method"].isin(varied)]):
        panels.append(("One setting each", None, rest))
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(0.8 + 3.2 * len(panels), 3.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, option, part) in zip(axes[0], panels, strict=True):
        rows = part.drop_duplicates("row")
        colors = plt.get_cmap("viridis" if option else "tab10")
        for i, (row, value) in enumerate(zip(rows["row"], rows[option or "row"], strict=True)):
            found = numbers[numbers["row"].eq(row)].sort_values("noise")
            axis.errorbar(
                100 * found["noise"],
                found["mean"],
                yerr=found["stderr"],
                marker="o",
                ms=3.5,
                capsize=2,
                color=colors(i / max(len(rows) - 1, 1) * 0.9) if option else colors(i),
                label=f"{GREEK.get(option, option)} = {_shown(value)}" if option else value,
            )
        axis.set(title=title, xlabel="flipped labels, %")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8, loc="best")
    axes[0][0].set_ylabel(f"{MEASURES[name].heading} (mean ± standard error)")
    return figure


def _shown(value: Any) -> str:
    """A number without the zeros that it is stored with; whatever else an option may be as it is."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m research.told_share FILE --output FIGURE``."""
    run_command("told_share", told_share, arguments)


if __name__ == "__main__":
    main()
