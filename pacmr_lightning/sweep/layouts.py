"""The tables of a sweep, in the paper's layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pandas as pd

from .results import GREEK, MEASURES, NUMBERS, WEIGHTS, columns, differences, means
from .spec import Sweep
from .tables import Entry, Table, Value

WIN = ("win_rate", "win_score")
HEADLINE = ("gold_reward", "win_rate", "win_score", "val_accuracy", "weight_gap")
"""Measures of the tables that list noise rates in rows."""


def tables(sweep: Sweep, frame: pd.DataFrame) -> list[Table]:
    """All tables that the finished cells have numbers for.

    Args:
        sweep: names the anchor and the comparisons.
        frame: rows of ``results.results``.
    """
    numbers = means(frame)
    seeds = numbers["seeds"]
    over = f"mean ± standard error over {_range(seeds)} seeds" if seeds.max() > 1 else "one seed"
    anchor = sweep.methods[sweep.anchor].label or sweep.anchor if sweep.anchor else ""
    known = [name for name in MEASURES if name in set(numbers["measure"])]
    found = []
    if set(WIN) <= set(known):
        caption = f"Pairwise evaluation against {anchor} by the gold reward; {over}"
        found.append(_by_method("main", caption, frame, numbers, WIN))
    for name in known:
        if name not in WIN:
            found.append(_by_method(name, f"{MEASURES[name].heading}; {over}", frame, numbers, [name]))
    for name, methods in sweep.comparisons.items():
        part = frame[frame["method"].isin(methods)]
        found.append(_by_noise(name, f"{' and '.join(part['row'].unique())}; {over}", part, numbers, ["row"]))
    names = columns(sweep)
    for name, method in sweep.methods.items():
        options = [names[option] for option, values in method.vary.items() if len(values) > 1]
        if options and frame["method"].eq(name).any():
            symbols = " and ".join(GREEK.get(option, option) for option in options)
            caption = f"{method.label or name} over {symbols}; {over}"
            part = frame[frame["method"].eq(name)]
            found.append(_by_noise("-".join([name, *options]), caption, part, numbers, options))
    weighted = frame[frame["flip_auroc"].notna()]
    if len(weighted):
        caption = f"Mean weights of unflipped and flipped training pairs; {over}"
        found.append(
            _by_noise("learned-weights", caption, weighted, numbers, ["row"], [*WEIGHTS, "weight_gap"])
        )
    if anchor:
        gaps = differences(frame)
        for name in known:
            part = gaps[gaps["measure"].eq(name) & gaps["second"].eq(anchor)]
            caption = f"{MEASURES[name].heading}: difference to {anchor}, seed by seed; {over}"
            if len(part):
                rows = part.rename(columns={"first": "row"})
                found.append(_by_method(f"difference-{name}", caption, frame, rows, [name], signed=True))
    return found


def _by_method(
    name: str,
    caption: str,
    frame: pd.DataFrame,
    numbers: pd.DataFrame,
    measures: Sequence[str],
    signed: bool = False,
) -> Table:
    """Methods in rows, bounds last; noise rates in columns, side by side for several measures."""
    rates = sorted(frame["noise"].unique())
    columns = [(measure, rate) for measure in measures for rate in rates]
    groups = [MEASURES[measure].heading if len(measures) > 1 else "" for measure, _ in columns]
    headings = [
        ("", "Method"),
        *((g, f"{rate:.0%} flipped") for g, (_, rate) in zip(groups, columns, strict=True)),
    ]
    known = numbers[numbers["measure"].isin(measures)]["row"].unique()
    rows = frame[frame["row"].isin(known)].drop_duplicates("row").sort_values("bound", kind="stable")
    fair = rows[~rows["bound"]]["row"]
    best = {} if signed else {column: _best(numbers, fair, *column) for column in columns}
    entries = [
        [row, *(_value(numbers, row, *column, row in best.get(column, ()), signed) for column in columns)]
        for row in rows["row"]
    ]
    return Table(name, caption, headings, entries, () if rows["bound"].nunique() == 1 else (len(fair),))


def _by_noise(
    name: str,
    caption: str,
    part: pd.DataFrame,
    numbers: pd.DataFrame,
    keys: Sequence[str],
    measures: Sequence[str] = HEADLINE,
) -> Table:
    """Noise rates in rows, within each of them the rows of the frame, named by some of its columns."""
    numbers = numbers[numbers["row"].isin(part["row"])]
    measures = [measure for measure in measures if measure in set(numbers["measure"])]
    named = ["Task", "Noise rate", *("Method" if key == "row" else GREEK.get(key, key) for key in keys)]
    headings = [("", heading) for heading in [*named, *(NUMBERS[measure].heading for measure in measures)]]
    entries = []
    for key, rows in part.drop_duplicates(["row", "noise"]).groupby("noise"):
        rate = cast("float", key)
        best = {
            measure: _best(numbers, rows["row"], measure, rate) for measure in measures if measure in MEASURES
        }
        for _, row in rows.iterrows():
            label = [str(row["task"]), f"{rate:.0%}", *(str(row[key]) for key in keys)]
            values = [_value(numbers, row["row"], m, rate, row["row"] in best.get(m, ())) for m in measures]
            entries.append([*label, *values])
    return Table(name, caption, headings, entries)


def _best(numbers: pd.DataFrame, rows: pd.Series, measure: str, rate: float) -> set[str]:
    """The rows with the largest mean, as far as the digits that are shown tell."""
    asked = numbers["row"].isin(rows) & numbers["measure"].eq(measure) & numbers["noise"].eq(rate)
    shown = numbers[asked].set_index("row")["mean"].round(NUMBERS[measure].digits)
    return set(shown.index[shown.eq(shown.max())])


def _value(
    numbers: pd.DataFrame, row: str, measure: str, rate: float, best: bool = False, signed: bool = False
) -> Entry:
    found = numbers[numbers["row"].eq(row) & numbers["measure"].eq(measure) & numbers["noise"].eq(rate)]
    if found.empty:
        return ""
    mean, stderr = found.iloc[0][["mean", "stderr"]]
    return Value(mean, stderr, NUMBERS[measure].digits, best, signed)


def _range(counts: pd.Series) -> str:
    """ "10", or "3 to 10" while cells are missing."""
    low, high = counts.min(), counts.max()
    return str(high) if low == high else f"{low} to {high}"
