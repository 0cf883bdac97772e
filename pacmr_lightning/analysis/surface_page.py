"""Weight functions of several runs on one page."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..files import local_path, save_figure
from .surface import Surface, load_surface, steps_of


def write_surface_page(runs: Sequence[str], output: str, step: int | None = None) -> None:
    """Draw the last surfaces of runs (or those of ``step``) side by side.

    ``output`` ends in .png or .pdf; both are written. Runs without surfaces are left out; UserError if none
    has any.
    """
    path = local_path(output)
    if path.suffix not in (".png", ".pdf"):
        raise UserError(f"output is {output}, but the figure's name must end in .png or .pdf.")
    drawn = [run for run in dict.fromkeys(runs) if steps_of(run)] or runs[:1]
    found = [(load_surface(run, step), run) for run in drawn]
    # Unknown noise rates last.
    found.sort(key=lambda pair: (np.isnan(pair[0].noise_rate), pair[0].noise_rate))
    laid_out, folders = zip(*found, strict=True)
    from .surface_figure import draw_page

    save_figure(draw_page(laid_out, run_names(laid_out, folders)), path.with_suffix(""))


def run_names(surfaces: Sequence[Surface], runs: Sequence[str]) -> list[str]:
    """Return names of runs: their noise rates, and with them the folders if two have the same rate."""
    noise = ["noise unknown" if np.isnan(s.noise_rate) else f"{s.noise_rate:.0%} noise" for s in surfaces]
    if len(set(noise)) == len(noise):
        return noise
    return [f"{words} ({Path(run).resolve().name})" for run, words in zip(runs, noise, strict=True)]
