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

import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..evaluation.answer_store import content_key
from ..policy.numerics import histogram
from .decisions import Texts
from .scorers import SCORES, VOTE
from .suspected import Findings
from .tables import groups_table, judges_table, methods_table, traits_table
from .words import findings_in_words, known_in_words, rules_in_words, traits_in_words, verdict

FOLD = 600
"""Characters of a text above which it is folded."""
RIGHT, WRONG, DARK = "#0072B2", "#D55E00", "0.25"
_LABELS = {
    "cross_fit_u": "Cross-fitted implicit reward margin $u$ (nats)",
    "combined_u": "Log-odds of the label by score and decisions (nats)",
    "judged_u": "Log-odds of the label by score and judges (nats)",
    "u": "Implicit reward margin $u$ (nats)",
    "probe_u": "Log-odds of the label by a linear probe (nats)",
}

# Control characters, and marks that change the direction of text.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def html_report(
    findings: Findings,
    run: str,
    texts: Mapping[str, Texts],
    notes: Iterable[str],
    traits: pd.DataFrame,
    sample: Sequence[str] = (),
    judges: pd.DataFrame | None = None,
) -> str:
    """Return the page, on which a person can review each listed pair.

    ``texts`` are those of listed pairs by id, ``sample`` ids of a random sample in reading order, ``judges``
    is ``reliability_of_judges``.
    """
    pairs = findings.pairs
    listed: dict[Any, Any] = {row.id: row for row in pairs.itertuples() if row.id in texts}
    known = int(pairs["flipped"].notna().sum())
    doubted = findings.doubted[0]
    votes = pairs.filter(regex=f"^{VOTE}").columns.tolist()
    script = _part("report.js")
    drawn = [
        _article(listed[name], texts[name], True, _facts(listed[name], f"random pair {i} of {len(sample)}"))
        for i, name in enumerate(sample, 1)
    ]
    suspected = [
        _article(row, texts[name], False, _suspect_facts(row, votes)) | {"verdict": _verdict(row)}
        for name, row in listed.items()
        if name not in set(sample)
    ]
    # Every inserted text is made visible and escaped.
    page = Environment(
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(visible_text(str(value))),
    ).from_string(_part("report.jinja"))
    return page.render(
        run=run,
        verdict=" ".join(filter(None, (verdict(findings), known_in_words(findings)))),
        notes=notes,
        figures={
            "Distribution of the score with the threshold": _png(_distribution(findings)),
        },
        threshold=findings_in_words(findings),
        doubted=doubted,
        rules=rules_in_words(traits, findings.agreement),
        traits=traits_in_words(traits, doubted),
        traits_table=traits_table(traits),
        judges=None if judges is None else judges_table(judges),
        methods=methods_table(findings.methods),
        groups={
            name: groups_table(groups, bool(known))
            for name, groups in findings.groups.groupby("grouping", sort=False)
            if groups["group"].notna().any()
        },
        sample=drawn,
        usable=findings.agreement.usable,
        suspected=suspected,
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


def _facts(row: Any, place: str, *more: str) -> str:
    category = [] if pd.isna(row.category) else [row.category]
    return " · ".join([place, row.id, *category, *more])


def _suspect_facts(row: Any, columns: Sequence[str]) -> str:
    facts = []
    if not pd.isna(row.p):
        facts += [f"p {row.p:.2f}", f"suggestion: {row.suggested}"]
    facts += ["swapped by the run's label noise"] if row.observed == "rejected" else []
    weight = "" if row.weight == 1 else f"weight {row.weight:.3f}, "
    facts.append(f"{weight}u {row.u:.2f}")
    votes = [vote for name in columns if not pd.isna(vote := getattr(row, name))]
    if votes:
        facts.append(f"judges: {votes.count(1)} for the label, {votes.count(-1)} against")
    facts += [] if pd.isna(row.cross_fit_u) else [f"cross-fitted u {row.cross_fit_u:.2f}"]
    return _facts(row, f"#{row.rank}", *facts)


def _verdict(row: Any) -> str:
    return "" if pd.isna(row.flipped) else "wrong" if row.flipped else "right"


def _article(row: Any, texts: Texts, sample: bool, facts: str) -> dict[str, Any]:
    """A pair; the facts of a randomly sampled one do not reveal its label's score."""
    # ASCII JSON keeps every id intact.
    known = {"id": row.id, "observed": row.observed, "sample": sample, "texts": row.texts}
    return {"named": json.dumps(known), "facts": facts, "texts": texts}


def _distribution(findings: Findings) -> Figure:
    """Histogram of the scores with the threshold, by right and wrong labels if known."""
    pairs, column = findings.pairs, SCORES[findings.scorer]
    score = pairs[column].to_numpy()
    figure, axis = _figure()
    edges = histogram(score, min(60, max(10, len(score) // 20)))[1].tolist()
    known = pairs["flipped"].notna().to_numpy()
    if known.any():
        flipped = pairs["flipped"].fillna(False).to_numpy(dtype=bool)
        for mask, color, name in (
            (known & ~flipped, RIGHT, "right labels"),
            (known & flipped, WRONG, "wrong labels"),
        ):
            label = f"{name} ({mask.sum():,})"
            axis.hist(score[mask], edges, color=color, alpha=0.35)
            axis.hist(score[mask], edges, color=color, histtype="step", linewidth=1.4, label=label)
    else:
        axis.hist(score, edges, color=RIGHT, alpha=0.6, label=f"all labels ({len(score):,})")
    if findings.cut is not None:
        axis.axvline(findings.cut, color=DARK, linestyle="--", linewidth=1.4, label="threshold")
    axis.set(xlabel=_LABELS[column], ylabel="Pairs", xlim=(edges[0], edges[-1]))
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.legend(frameon=False)
    return figure


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.4, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return base64.b64encode(buffer.getvalue()).decode()
