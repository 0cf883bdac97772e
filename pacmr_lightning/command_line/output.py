"""Standard output for results, standard error for everything else."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from rich.console import Console, RenderableType

_stdout: TextIO | None = None


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to ``cli.main``; rich would exit with status 1."""
        raise


@contextmanager
def only_results() -> Iterator[None]:
    """Redirect prints in the block, also of libraries, to standard error, except ``print_result``."""
    global _stdout
    outer = _stdout
    _stdout = outer or sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout = outer


def print_result(what: RenderableType = "", style: str | None = None, width: int = 0) -> None:
    """Print a text or table of at least ``width`` columns; lines in a file or pipe are never broken."""
    console = _Console(file=_stdout or sys.stdout, highlight=False, markup=False)
    wide = console.is_terminal or "COLUMNS" in os.environ
    console.width = max(console.width, width if wide else 200)
    console.print(what, style=style, soft_wrap=isinstance(what, str) and not console.is_terminal)
