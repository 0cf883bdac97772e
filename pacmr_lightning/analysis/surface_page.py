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
    names = run_names(laid_out, folders)
    from .surface_figure import draw_page

    save_figure(draw_page(laid_out, names), path.with_suffix(""))


def run_names(surfaces: Sequence[Surface], runs: Sequence[str]) -> list[str]:
    """Return names that tell runs apart: noise rate, then task, or else folder."""
    noise = ["noise unknown" if np.isnan(s.noise_rate) else f"{s.noise_rate:.0%} noise" for s in surfaces]
    with_task = [f"{s.task}, {words}" for s, words in zip(surfaces, noise, strict=True)]
    folders = [Path(run).resolve().name for run in runs]
    with_folder = [f"{words} ({name})" for name, words in zip(folders, noise, strict=True)]
    choices = (noise, with_task, with_folder)
    return next((names for names in choices if len(set(names)) == len(names)), list(runs))
