"""Sentences and tables of an audit, as the terminal and the page show them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd

from .agreement import SCORE_VOTES, Agreement
from .annotators import LEAST
from .manual_review import settled, undecided
from .scorers import Scorer
from .suspected import Findings

_SCORES: dict[Scorer, str] = {
    "probe": "u is the log-odds of the label under a linear probe on the base model's hidden states, fitted "
    "to the labels of other prompts.",
    "policy": "u is the policy's implicit reward margin.",
    "dpo": "u comes from two DPO policies, each trained on half of the prompts and scoring the other half.",
    "combined": "u is a sum of the score and of the differences of lengths and of log-probabilities under "
    "the reference, weighted by the decisions by hand (a logistic regression).",
}
_JUDGED = (
    "A verdict adds the logit of its judge's reliability, which is estimated with eps and k, to k u (Dawid "
    "and Skene, 1979). Judges that err with the score, or with each other, get too high a reliability."
)
SHOWN = 5
_FOLLOWED = (
    "If that feature does not make responses better, it is a shortcut of the labellers. A policy learns such "
    "a shortcut: it then ranks right labels that break it as errors and misses wrong ones that follow it, so "
    "dropping suspected label errors makes the data worse. Read some of these pairs before using this audit."
)
_CONTRADICTED = (
    "expected fraction that another annotator would contradict (with a given rate: that is wrong), the mean "
    "of 1 - p, of the"
)
GROUPS = 100
"""Most groups in a table."""


def verdict(findings: Findings) -> str:
    """Return the audit's result in up to three sentences: how many labels would be contradicted."""
    fit, pairs, number = findings.agreement, findings.pairs, findings.suspected
    by_hand = ""
    if settled(pairs).any():
        wrong, right, dropped = (pairs["decision"].eq(word).sum() for word in ("swap", "keep", "drop"))
        by_hand = f" Decided by hand: {wrong:,} wrong, {right:,} right, {dropped:,} dropped."
    if not fit.usable:
        return (
            f"These {len(pairs):,} labels cannot be predicted from the scores better than by a coin, so no "
            f"{'undecided ' if by_hand else ''}label is suspected.{by_hand}"
        )
    share, low, high = findings.contradicted
    left = int(undecided(pairs).sum())
    these = "these suspected labels" if left == number else f"the {left:,} undecided ones"
    which = f"{number:,} of {len(pairs):,} labels"
    below = "" if findings.threshold == 0.5 else f"{which} have p below {findings.threshold:g}"
    if fit.known:
        said = below or f"{which} are probably wrong"
        if left:
            said += f"; {share:.0%} of {these} are expected to be wrong ({low:.0%} to {high:.0%})"
        return f"{said}, at a given rate of random flips of {fit.rate:.1%}.{by_hand}"
    said = f"{below or f'A second annotator would probably contradict {which}'}."
    if left:
        within = f"(95% interval {low:.0%} to {high:.0%})"
        said += f" Of {these} {share:.0%} are expected to be contradicted {within}."
    return said + by_hand


def known_in_words(findings: Findings) -> str:
    """Return how many labels are known to be wrong; empty without any that are known."""
    flipped = findings.pairs["flipped"]
    if not (known := int(flipped.notna().sum())):
        return ""
    wrong = int(flipped.sum())
    return f"Known to be wrong: {wrong:,} of {known:,} labels ({wrong / known:.1%})."


def flips_in_words(found: Agreement) -> str:
    """Return the rate of random flips with its 95% interval; empty if it is not identified."""
    if found.known or not found.identified:
        return ""
    return (
        f"Rate of random flips, if the errors are such: {found.rate:.1%} (95% interval {found.low:.1%} to "
        f"{found.high:.1%})."
    )


def findings_in_words(findings: Findings) -> list[str]:
    """Return sentences on how p was estimated, and on its limits."""
    fit, pairs = findings.agreement, findings.pairs
    told = [_SCORES[findings.alone], *([_JUDGED] if findings.scorer == "judge" else [])]
    told.append(
        "Of the votes on pairs with this u a share c = eps + (1 - 2 eps) sigmoid(k u) is for the label; "
        f"fitted to these labels, eps is {fit.rate:.3f} and k {fit.slope:.3g} per nat. Out of fold this "
        f"predicts a label {fit.gain:.3f} ± {fit.gain_error:.3f} nats better than a coin."
    )
    if fit.known:
        told.append("eps is given as the rate of random flips: p is the probability that the label is right.")
    else:
        measured = "elsewhere" if fit.strength == SCORE_VOTES else "on the pairs with several votes"
        told.append(
            "p is the probability that another annotator of the same pool agrees with the label. The label "
            f"is a vote, and the score counts as s = {fit.strength:.1f} votes, as measured {measured}."
        )
    if not fit.usable:
        return [*told, "No label is suspected; the ranks say which pairs to read first."]
    parts = findings.cut is not None and findings.scorer == findings.alone  # with judges it is not u
    cut = f" (u below {findings.cut:.3g})" if parts else ""
    number = f"{pairs['suggested'].eq('swap').sum():,} of {len(pairs):,}"
    number += ", before decisions by hand" if settled(pairs).any() else ""
    told.append(f"Labels with p below {findings.threshold:g}{cut} are suspected: {number}.")
    if not fit.known:
        total, low, high = fit.contradicted(fit.p >= 0)
        told.append(
            f"Over all labels another annotator would contradict {total:.0%} ({low:.0%} to {high:.0%})."
        )
    return [*told, *filter(None, [flips_in_words(fit)])]


def shortcuts_in_words(shortcuts: pd.DataFrame) -> list[str]:
    """Return sentences on the first ``SHOWN`` ``shortcuts``; empty without any."""
    told = []
    for row in shortcuts.head(SHOWN).to_dict("records"):
        place = f"with the word “{row['trait']}” in only one response"
        which = f"the response {row['chosen']} it"
        if row["kind"] == "length":
            place = "whose responses differ in length"
            which = f"the {'longer' if row['chosen'] == 'with' else 'shorter'} response"
        told.append(
            f"Labels follow a shortcut: in {share_of(row['share'])} of {row['pairs']:,} pairs {place}, "
            f"{which} is the chosen one (95% interval {share_of(row['low'])} to {share_of(row['high'])})."
        )
    return [*told, _FOLLOWED] if told else []


def share_of(share: float) -> str:
    """Return a fraction in percent, with tenths near 0 and 1."""
    return f"{share:.0%}" if 0.02 <= share <= 0.98 or share in (0, 1) else f"{share:.1%}"


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
    notes = [f"Contradicted: {_CONTRADICTED} suspected labels, without decisions by hand."]
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
    notes = [f"Contradicted: {_CONTRADICTED} labels. Groups of fewer than {LEAST} pairs have no interval."]
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
