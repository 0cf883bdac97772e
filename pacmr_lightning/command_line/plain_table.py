"""Tables in the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table


def plain_table(*headings: str) -> Table:
    """Return an empty table: text in the first column, numbers in the others."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
