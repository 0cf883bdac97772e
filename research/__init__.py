"""Experiments that measure methods and theory, run from a checkout; README.md is their index."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

os.environ.setdefault("MPLBACKEND", "agg")


def write_png(figure: Figure, path: str, dpi: float | str = "figure") -> None:
    """Write a PNG whole or not at all."""
    from pacmr_lightning.files import replacing

    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format="png")


def command(name: str, function: Callable[..., Any]) -> Callable[..., None]:
    """Return the main function of ``python -m research.NAME``, which calls ``function``.

    Type hints and docstring make options and help, as for ``pacmr``; bad input ends in one sentence.
    """

    def main(arguments: Sequence[str] | None = None) -> None:
        from pacmr_lightning.command_line.exceptions import stop
        from pacmr_lightning.command_line.parser import call
        from pacmr_lightning.errors import user_error

        try:
            call(
                f"python -m research.{name}", function, [*(sys.argv[1:] if arguments is None else arguments)]
            )
        except Exception as error:
            cause = user_error(error)
            if cause is None and isinstance(error, OSError) and error.filename:
                stop(f"{error.filename} cannot be read ({error.strerror}); name another file.")
            if cause is None:
                raise
            stop(str(cause))

    return main
