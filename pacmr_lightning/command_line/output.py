"""Standard output for results, standard error for everything else."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Column, Table

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


def print_result(what: RenderableType = "", style: str | None = None) -> None:
    """Print a text or table; lines in a file or pipe are never broken."""
    console = _Console(file=_stdout or sys.stdout, highlight=False, markup=False)
    wide = console.options.update(max_width=10_000)
    needed = console.measure(what, options=wide).maximum
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = max(console.width, 200, needed)
    if isinstance(what, Table) and needed > console.width:
        for column in what.columns[1:]:
            column.header = str(column.header).replace(" ", "\n")
        what.columns[0].max_width = 12  # folded to no less; the terminal breaks lines that are too long still
        console.width = max(console.width, console.measure(what, options=wide).maximum)
        what.columns[0].max_width = None
    console.print(what, style=style, soft_wrap=isinstance(what, str) and not console.is_terminal)


def plain_table(first: str, *others: str) -> Table:
    """Return an empty table for text in the first column and numbers in the others."""
    parts = Column(first, overflow="fold"), *(Column(each, justify="right", no_wrap=True) for each in others)
    return Table(*parts, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
