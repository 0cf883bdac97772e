"""Tables of an audit, as the terminal and the page show them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd

from .group_reliability import LEAST

GROUPS = 100
"""Most groups in a table."""


class Table(NamedTuple):
    """Cells of a table as people read them."""

    heading: list[str]
    rows: list[list[str]]
    notes: list[str]


_Columns = dict[str, tuple[str, Callable[[Any], str]]]
"""Headings of a table by its columns, and the form of their values."""


def _table(frame: pd.DataFrame, columns: _Columns, notes: list[str]) -> Table:
    rows = [
        ["–" if pd.isna(row[name]) else form(row[name]) for name, (_, form) in columns.items()]
        for row in frame.to_dict("records")
    ]
    return Table([heading for heading, _ in columns.values()], rows, notes)


def _with_interval(frame: pd.DataFrame) -> pd.DataFrame:
    low, high = (frame[name].map("{:.1%}".format) for name in ("low", "high"))
    return frame.assign(interval=(low + " to " + high).where(frame["low"].notna()))


def methods_table(methods: pd.DataFrame) -> Table:
    """Return the table of ``detection_quality``, without columns of which nothing is known."""
    columns: _Columns = {
        "method": ("score", str),
        "suspected": ("suspected", "{:,}".format),
        "contradicted": ("contradicted", "{:.0%}".format),
        "precision": ("precision", "{:.2f}".format),
        "recall": ("recall", "{:.2f}".format),
        "auroc": ("AUROC", "{:.2f}".format),
        "average_precision": ("AP", "{:.2f}".format),
    }
    notes = ["Contradicted: expected fraction of suspected labels that another annotator would contradict."]
    if methods["recall"].notna().any():
        notes.append(
            "Precision and recall are of the suspected label errors, against the known flips; AP is average "
            "precision."
        )
    known = {name: column for name, column in columns.items() if methods[name].notna().any()}
    return _table(methods, known, notes)


def groups_table(groups: pd.DataFrame, known: bool) -> Table:
    """Return the table of one grouping of ``group_reliability``."""
    columns: _Columns = {
        "group": (groups["grouping"].iloc[0], str),
        "pairs": ("pairs", "{:,}".format),
        "suspected": ("suspected", "{:,}".format),
        "contradicted": ("contradicted", "{:.1%}".format),
        "interval": ("95% interval", str),
    }
    notes = [
        "Contradicted: expected fraction of the labels that another annotator would contradict, the mean of "
        f"1 - p. Groups of fewer than {LEAST} pairs have no interval."
    ]
    if "reliability" in groups and groups["reliability"].notna().any():
        columns["reliability"] = "reliability", "{:.1%}".format
        notes.append(
            "Reliability: probability that a label of the annotator is right, if each annotator errs at one "
            "rate on all pairs (Dawid and Skene). Without several votes on a pair only the score tells it."
        )
    if known:
        columns["flipped"] = "known to be wrong", "{:.1%}".format
    if (more := len(groups) - GROUPS) > 0:
        notes.append(f"{more:,} more groups are in the file of groups.")
    shown = groups[groups["group"].notna()].head(GROUPS)
    return _table(_with_interval(shown), columns, notes)


def judges_table(judges: pd.DataFrame) -> Table:
    """Return the table of ``reliability_of_judges``."""
    columns: _Columns = {
        "judge": ("judge", str),
        "pairs": ("pairs", "{:,}".format),
        "for_label": ("for the label", "{:,}".format),
        "against_label": ("against it", "{:,}".format),
        "none": ("no verdict", "{:,}".format),
        "reliability": ("reliability", "{:.1%}".format),
        "interval": ("95% interval", str),
    }
    note = "Reliability is the probability that a verdict names the better response."
    return _table(_with_interval(judges), columns, [note])
