"""The tables of an audit's report, as HTML."""

from __future__ import annotations

import re
from html import escape
from typing import Any

import pandas as pd

from .group_reliability import LEAST
from .suspect_traits import LEVEL
from .traits_in_words import share_of, trait_name

GROUPS = 100
"""Groups in a table; the files have all."""
TRAITS = 30
"""Traits in the table; the files have all."""

# Control characters, which HTML cannot hold or a browser would act on, and the marks that change the
# direction of the text after them.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def as_text(text: str) -> str:
    """HTML that shows a text as it is; control and direction characters are named, as in [U+202E]."""
    visible = _INVISIBLE.sub(lambda match: f"[U+{ord(match[0]):04X}]", text.replace("\r\n", "\n"))
    return escape(visible, quote=True)


def methods_table(methods: pd.DataFrame, known: bool) -> list[str]:
    """What each score found, of ``detection_quality.compare``; against the truth where some is known."""
    heading = ["score", "suspects", "expected share"]
    heading += ["precision", "recall", "AUROC", "average precision"] if known else []
    rows = []
    row: Any  # its fields are the columns
    for row in methods.itertuples():
        expected = _number(row.expected, "{:.1%}")
        if not pd.isna(row.expected_stderr):
            expected += f" ± {row.expected_stderr:.1%}"
        cells = [row.method, f"{row.suspects:,}", expected]
        values = (row.precision, row.recall, row.auroc, row.average_precision)
        rows.append(cells + ([_number(value, "{:.3f}") for value in values] if known else []))
    notes, names = [], methods["method"].tolist()
    if "loss" in names:  # which a probe without a policy does not have
        alone = names[0] == "u"
        others = "loss has no threshold of its" if alone else "loss and u have no threshold of their"
        notes.append(f"{others} own: as many as by the first score are suspect.")
    if not methods["method"].str.startswith("cleanlab").any():
        notes.append("Confident learning is left out: cleanlab is not installed (pip install cleanlab).")
    if known:
        notes.append("Precision and recall are those of the suspects, against the flips that are known.")
    return [_table(heading, rows), *map(_note, notes)]


def groups_table(groups: pd.DataFrame, known: bool) -> list[str]:
    """The reliability of the groups of one grouping, of ``group_reliability``."""
    heading = [
        groups["grouping"].iloc[0],
        "pairs",
        "suspects",
        "suspect share",
        "expected share",
        "95% interval",
    ]
    learned = "learned" in groups
    heading += ["learned in the run"] if learned else []
    heading += ["known to be wrong"] if known else []
    rows = []
    row: Any  # its fields are the columns
    for row in groups.head(GROUPS).itertuples():
        interval = "–" if pd.isna(row.low) else f"{row.low:.1%} to {row.high:.1%}"
        cells = [
            "(none)" if pd.isna(row.group) else row.group,
            f"{row.pairs:,}",
            f"{row.suspects:,}",
            f"{row.suspect_share:.1%}",
            _number(row.expected, "{:.1%}"),
            interval,
        ]
        cells += [_number(row.learned, "{:.1%}")] if learned else []
        rows.append(cells + ([_number(row.flipped, "{:.1%}")] if known else []))
    notes = [
        "The expected share of wrong labels of each group is fitted with the slope that all groups share; "
        f"groups of fewer than {LEAST} pairs have none, nor has any where the scores fit labels that are "
        "coin flips, or where the labels contradict the share of all pairs that was told or assumed."
    ]
    if learned:
        notes.append(
            "Learned in the run is the share that its objective has estimated along the way from its own u "
            "(1 - reliability): a moving average, which takes sigmoid(u) for the chance that the policy is "
            "right and knows nothing of a label's own part in u."
        )
    if (more := len(groups) - GROUPS) > 0:
        notes.append(f"{more:,} more groups are in the file of groups.")
    return [_table(heading, rows), *map(_note, notes)]


def traits_table(traits: pd.DataFrame) -> list[str]:
    """What suspects have in common, of ``suspect_traits``: the traits that pass its correction."""
    found = traits[traits["p_adjusted"] < LEVEL]
    if found.empty:
        return []
    heading = ["trait", "suspects", "of them", "others", "of them", "difference", "95% interval", "p", "all"]
    rows = []
    row: Any  # its fields are the columns
    for row in found.head(TRAITS).itertuples():
        rows.append(
            [
                trait_name(row),
                f"{row.suspects:,}",
                share_of(row.in_suspects),
                f"{row.others:,}",
                share_of(row.in_others),
                f"{100 * row.difference:+.0f}",
                f"{100 * row.low:+.0f} to {100 * row.high:+.0f}",
                f"{row.p_adjusted:.1g}",
                share_of(row.in_all),
            ]
        )
    notes = [
        "A word or the length counts in pairs where it tells the responses apart, and the share is of those "
        "whose chosen response has it; the share of all labels stands under all. Differences are in "
        "percentage points, p is adjusted for all "
        f"{traits['p'].notna().sum():,} traits that were tested (Benjamini and Hochberg)."
    ]
    if (more := len(found) - TRAITS) > 0:
        notes.append(f"{more:,} more traits are in the file of traits.")
    return [_table(heading, rows), *map(_note, notes)]


def _table(heading: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heading)
    body = "".join("<tr>" + "".join(f"<td>{as_text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _number(value: float, form: str) -> str:
    return "–" if pd.isna(value) else form.format(value)
