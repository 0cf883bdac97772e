"""Writes the tables and figures of a sweep's finished cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..files import replacing
from .cells import Cell
from .layouts import tables
from .results import differences, results
from .spec import Sweep

PAGE = "tables.md"
"""File of all tables."""


def report(sweep: Sweep, done: Sequence[Cell]) -> Path:
    """Writes them into the sweep's ``report`` folder.

    ``tables.md`` has all tables, ``tables/`` each of them as .csv and .tex, ``cells.csv`` every cell's
    numbers, ``differences.csv`` those between each two rows, and ``figures/`` the figures as .png and .pdf.

    Returns:
        The path of ``tables.md``.
    """
    from .figures import draw_all

    folder = Path(sweep.report or sweep.output)
    frame = results(sweep, done)
    found = tables(sweep, frame)
    texts = {f"tables/{table.name}.csv": table.csv() for table in found}
    texts |= {f"tables/{table.name}.tex": table.latex() for table in found}
    texts |= {
        "cells.csv": frame.to_csv(index=False),
        "differences.csv": differences(frame).to_csv(index=False),
    }
    texts[PAGE] = "\n".join(table.markdown() for table in found)
    for name, text in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    draw_all(sweep, frame, folder / "figures")
    return folder / PAGE
