"""Tables and figure of a sweep's frontiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ..errors import UserError
from ..files import replacing
from .frontier import (
    CHOSEN_BY,
    at_best,
    at_kls,
    choosers,
    compared,
    left_out,
    measures,
    of_tuning_seeds,
    summary,
)
from .results import NUMBERS
from .spec import Frontier, Sweep
from .tables import Entry, Table, Value

SURE = 0.05
"""Differences whose p after Holm's correction is under this are bold."""


def frontier_report(sweep: Sweep, frontier: Frontier, frame: pd.DataFrame, folder: Path) -> Path:
    """Writes what a sweep says of methods at one KL, and of each at its best.

    ``tables.md`` has all tables, ``tables/`` each of them as .csv and .tex, ``cells.csv`` every cell's
    numbers, ``frontier.csv`` means over seeds of every cell's, ``matched.csv`` and ``best-*.csv`` what tables
    are made of with ``*-differences.csv``, and ``figures/frontier`` the figure as .png and .pdf.

    Args:
        sweep: of the cells.
        frontier: what to compare.
        frame: rows of ``results.results``.
        folder: where to write.

    Returns:
        The path of ``tables.md``.

    Raises:
        UserError: no run of the tuning seeds is there, no run has a measure to choose by or a KL, or
            the ceiling cannot be drawn.
    """
    from .frontier_figure import draw_frontier

    # A curve is made of runs at all options; at one KL no option is chosen by them.
    curves = of_tuning_seeds(frame, frontier.tuning_seeds)
    if curves.empty:
        seeds = ", ".join(map(str, frontier.tuning_seeds))
        raise UserError(f"No run of the tuning seeds {seeds} has finished; run them first.")
    names = measures(frame)
    matched = at_kls(curves, frontier.kls, names)
    texts = {
        "cells.csv": frame.to_csv(index=False),
        "frontier.csv": summary(curves, sweep, ["row"], names).to_csv(index=False),
    }
    found = []
    parts = [("matched", "at one KL", matched, ["kl"])]
    deciding = choosers(frame)
    for measure in deciding:
        best = at_best(frame, frontier.tuning_seeds, measure)
        parts.append((f"best-{measure}", f"at its best by {CHOSEN_BY[measure]}", best, []))
    for name, words, rows, keys in parts:
        numbers, gaps = summary(rows, sweep, keys, names), compared(rows, frontier.subject, keys, names)
        texts[f"{name}.csv"] = numbers.to_csv(index=False)
        texts[f"{name}-differences.csv"] = gaps.to_csv(index=False)
        found += [_values(sweep, name, words, numbers, keys, measure) for measure in names]
        found += [_gaps(sweep, frontier, name, words, gaps, keys, names, measure) for measure in names]
    texts |= {f"tables/{table.name}.csv": table.csv() for table in found}
    texts |= {f"tables/{table.name}.tex": table.latex() for table in found}
    note = left_out(curves, deciding)
    texts["tables.md"] = f"{note}\n\n" * bool(note) + "\n".join(table.markdown() for table in found)
    for name, text in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    draw_frontier(sweep, frontier, curves, names[0], folder / "figures" / "frontier")
    return folder / "tables.md"


def _columns(table: pd.DataFrame, keys: Sequence[str]) -> list[tuple[float, ...]]:
    return sorted(table[["noise", *keys]].drop_duplicates().itertuples(index=False, name=None))


def _headings(columns: Sequence[tuple[float, ...]]) -> list[tuple[str, str]]:
    return [
        (f"{noise:.0%} flipped" if key else "", f"{key[0]:g} nats" if key else f"{noise:.0%} flipped")
        for noise, *key in columns
    ]


def _at(table: pd.DataFrame, method: str, keys: Sequence[str], column: tuple[float, ...]) -> pd.DataFrame:
    same = table["method"].eq(method)
    for key, value in zip(["noise", *keys], column, strict=True):
        same &= table[key].eq(value)
    return table[same]


def _values(
    sweep: Sweep, name: str, words: str, numbers: pd.DataFrame, keys: Sequence[str], measure: str
) -> Table:
    """Methods in blocks of what they are told; the best of each block is bold."""
    columns = _columns(numbers, keys)
    rows: list[list[Entry]] = []
    rules, told = [], None
    best = numbers.groupby(["told", "noise", *keys])[measure].transform("max")
    for method in [name for name in sweep.methods if name in set(numbers["method"])]:
        if sweep.methods[method].told != told and rows:
            rules.append(len(rows))
        told = sweep.methods[method].told
        entries: list[Entry] = []
        for column in columns:
            found = _at(numbers, method, keys, column)
            if found.empty:
                entries.append("")
                continue
            row = found.iloc[0]
            is_best = bool(row[measure] == best[found.index[0]])
            entries.append(Value(row[measure], row[f"{measure}_stderr"], NUMBERS[measure].digits, is_best))
        rows.append([told, sweep.methods[method].label or method, *entries])
    caption = f"{NUMBERS[measure].heading} of each method {words}; mean ± standard error over seeds"
    return Table(
        f"{name}-{measure}", caption, [("", "Told"), ("", "Method"), *_headings(columns)], rows, tuple(rules)
    )


def _gaps(
    sweep: Sweep,
    frontier: Frontier,
    name: str,
    words: str,
    gaps: pd.DataFrame,
    keys: Sequence[str],
    names: Sequence[str],
    measure: str,
) -> Table:
    """The subject minus each other method, with 95% intervals."""
    part = gaps[gaps["measure"].eq(measure)]
    columns = _columns(part, keys)
    rows: list[list[Entry]] = []
    for method in [name for name in sweep.methods if name in set(part["method"])]:
        entries: list[Entry] = []
        for column in columns:
            found = _at(part, method, keys, column)
            entries.append("" if found.empty else _interval(found.iloc[0], NUMBERS[measure].digits))
        rows.append([sweep.methods[method].told, sweep.methods[method].label or method, *entries])
    subject = sweep.methods[frontier.subject].label or frontier.subject
    caption = (
        f"{NUMBERS[measure].heading}: {subject} minus each method {words}, paired over seeds, with 95% "
        f"intervals; bold: p < {SURE} after Holm's correction over this table"
        f"{' and its twin' if len(names) > 1 else ''}"
    )
    headings = [("", "Told"), ("", f"{subject} minus"), *_headings(columns)]
    return Table(f"{name}-{measure}-differences", caption, headings, rows)


def _interval(row: pd.Series, digits: int) -> str:
    text = f"{row['mean']:+.{digits}f} [{row['low']:+.{digits}f}, {row['high']:+.{digits}f}]"
    return f"**{text}**" if row["p_holm"] < SURE else text
