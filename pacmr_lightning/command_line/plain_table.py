"""Tables in the terminal."""

from rich.box import SIMPLE_HEAD
from rich.table import Table


def plain_table(*headings: str) -> Table:
    """Return an empty table; with headings, text in the first column and numbers in the others."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, heading in enumerate(headings):
        table.add_column(heading, **({"justify": "right", "no_wrap": True} if i else {"overflow": "fold"}))
    return table
