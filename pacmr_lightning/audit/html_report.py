"""An audit as one self-contained HTML file; all texts of rows are escaped."""

import base64
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from ..evaluation.answer_store import content_key
from . import words
from .manual_review import SETTLING, Texts, decided_wrong, undecided
from .scorers import NAMES, SCORES, VOTE
from .suspected import Findings

FOLD = 600
"""Characters of a text above which it is folded."""
RIGHT, WRONG, DARK = "#0072B2", "#D55E00", "0.25"
# Control characters, and marks that change the direction of text.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def html_report(
    findings: Findings,
    run: str,
    texts: Mapping[str, Texts],
    notes: Iterable[str],
    shortcuts: pd.DataFrame,
    sample: Sequence[str] = (),
    judges: pd.DataFrame | None = None,
) -> str:
    """Return the page, on which a person can review each listed pair.

    ``texts`` are those of listed pairs by id and ``sample`` ids of a random sample, both in reading order,
    ``judges`` is ``reliability_of_judges``.
    """
    pairs = findings.pairs
    listed: dict[Any, Any] = {row.id: row for row in pairs.itertuples() if row.id in texts}
    known = int(pairs["flipped"].notna().sum())
    votes = pairs.filter(regex=f"^{VOTE}").columns.tolist()
    script = _part("report.js")
    suspected = set(pairs["id"][undecided(pairs) | decided_wrong(pairs)])
    own = {SCORES[findings.alone]: "u"}  # as the page names the score behind p
    policy = {"u": "policy's u"} if pairs["delta"].notna().any() else {}
    scores = own | policy | {"cross_fit_u": "cross-fitted u"} | own
    drawn = [
        _article(listed[name], texts[name], f"random pair {i} of {len(sample)}")
        for i, name in enumerate(sample, 1)
    ]
    others = [listed[name] for name in texts if name not in set(sample)]
    ranked = [_article(row, texts[row.id], f"#{row.rank}", _results(row, votes, scores)) for row in others]
    # Every inserted text is made visible and escaped.
    page = Environment(
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(visible_text(str(value))),
    ).from_string(_part("report.jinja"))
    return page.render(
        run=run,
        verdict=" ".join(filter(None, (words.verdict(findings), words.known_in_words(findings)))),
        notes=notes,
        figure=_distribution(findings),
        threshold=words.findings_in_words(findings),
        shortcuts=words.shortcuts_in_words(shortcuts),
        judges=None if judges is None else words.judges_table(judges),
        methods=words.methods_table(findings.methods),
        groups={
            name: words.groups_table(groups, bool(known))
            for name, groups in findings.groups.groupby("grouping", sort=False)
            if groups["group"].notna().any()
        },
        sample=drawn,
        usable=findings.agreement.usable,
        ranked=ranked,
        suspected=sum(row.id in suspected for row in others),
        decided="decision" in pairs,
        fold=FOLD,
        style=Markup(_part("report.css")),
        # Only this script runs, whatever a row contains.
        digest=base64.b64encode(sha256(script.encode()).digest()).decode(),
        labels=content_key(sorted(zip(pairs["id"], pairs["observed"], pairs["texts"], strict=True))),
        script=Markup(script),
    )


def visible_text(text: str) -> str:
    """Return HTML of a text; control and direction characters are named, as in [U+202E]."""
    visible = _INVISIBLE.sub(lambda match: f"[U+{ord(match[0]):04X}]", text.replace("\r\n", "\n"))
    return escape(visible, quote=True)


def _part(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _article(row: Any, texts: Texts, place: str, results: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a pair for the page; a randomly sampled one has no results, so that none are revealed."""
    facts = [place, row.id, *([] if pd.isna(row.category) else [row.category]), *(results or ())]
    truth = "" if results is None or pd.isna(row.flipped) else "wrong" if row.flipped else "right"
    # ASCII JSON keeps every id intact.
    known = {"id": row.id, "observed": row.observed, "sample": results is None, "texts": row.texts}
    return {"named": json.dumps(known), "facts": " · ".join(facts), "texts": texts, "truth": truth}


def _results(row: Any, votes: Sequence[str], scores: Mapping[str, str]) -> list[str]:
    facts = [] if pd.isna(row.p) else [f"p {row.p:.2f}", f"suggestion: {row.suggested}"]
    if (word := str(getattr(row, "decision", ""))) in SETTLING:
        facts = [f"decided: {word}"]
    facts += ["swapped by the run's label noise"] if row.observed == "rejected" else []
    facts += [] if row.weight == 1 else [f"weight {row.weight:.3f}"]
    facts += [f"{name} {u:.2f}" for key, name in scores.items() if not pd.isna(u := getattr(row, key))]
    if cast := [vote for name in votes if not pd.isna(vote := getattr(row, name))]:
        facts.append(f"judges: {cast.count(1)} for the label, {cast.count(-1)} against")
    return facts


def _distribution(findings: Findings) -> str:
    """Return a histogram of the scores with the threshold, by right and wrong labels if known, as a PNG."""
    pairs = findings.pairs
    score, flipped = pairs[SCORES[findings.scorer]].to_numpy(), pairs["flipped"]
    figure = Figure(figsize=(5.4, 3.4), layout="constrained")
    axis = figure.add_subplot(xlabel=f"{NAMES[findings.scorer]} (nats)", ylabel="Pairs")
    edges = _edges(score, min(60, max(10, len(score) // 20)))
    groups = {"right labels": (flipped.eq(False), RIGHT), "wrong labels": (flipped.eq(True), WRONG)}
    if flipped.isna().all():
        groups = {"all labels": (flipped.isna(), RIGHT)}
    for name, (mask, color) in groups.items():
        values = score[mask.fillna(False).to_numpy(dtype=bool)]
        style: dict[str, Any] = {"histtype": "stepfilled", "facecolor": (color, 0.35), "edgecolor": color}
        axis.hist(values, edges, label=f"{name} ({len(values):,})", **style)
    if findings.cut is not None:
        axis.axvline(findings.cut, color=DARK, linestyle="--", linewidth=1.4, label="threshold")
    axis.set_xlim(edges[0], edges[-1])
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return base64.b64encode(buffer.getvalue()).decode()


def _edges(values: np.ndarray, bins: int) -> list[float]:
    """Return (B + 1,) edges of a histogram of (N,) values, also of values that are equal up to rounding."""
    low, high = values.min(), values.max()
    margin = 0.5 if high - low <= 1e-9 * max(abs(low), abs(high), 1e-99) else 0.0
    return np.linspace(low - margin, high + margin, bins + 1).tolist()
