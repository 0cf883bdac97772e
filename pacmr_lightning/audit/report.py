"""An audit as one HTML file that needs nothing else; whatever stands in a row is shown as text."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import pandas as pd

from ..evaluation.answer_store import content_key
from .figures import against, distribution
from .findings import Findings
from .findings_in_words import sentences, share_in_words
from .listed_pairs import Texts, sampled, suspect
from .report_tables import as_text, groups_table, methods_table, traits_table
from .traits_in_words import rules_in_words, traits_in_words

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body data-labels="{labels}">
{body}
<script>{script}</script>
</body>
</html>
"""
_NO_SCRIPT = [
    "<noscript><p>Decisions are made on this page with JavaScript; without it the page can be read.</p>"
    "</noscript>"
]
_SAMPLE = [
    "<h2>A random sample</h2>",
    "<p>These pairs were drawn at random, and nothing is said of what the audit makes of them. Decide on "
    "them in this order, before you look at suspects: keep where the chosen response is the better one, "
    "exchange where it is the rejected one. The share of wrong labels is estimated from these decisions; "
    "drop (nothing should be learned from the pair) and unsure are counted and left out of it.</p>",
]


def report(
    findings: Findings,
    run: str,
    texts: Mapping[str, Texts],
    notes: Iterable[str],
    traits: pd.DataFrame,
    sample: Sequence[str] = (),
) -> str:
    """The page, on which a person can decide on each pair that it lists.

    Args:
        findings: what was found.
        run: the run's folder.
        texts: of the pairs that are listed, by id: those of the sample, and suspects.
        notes: further sentences on the pairs.
        traits: what the suspects have in common, as ``suspect_traits`` makes it.
        sample: ids of a random sample, in the order in which it is read.
    """
    pairs = findings.pairs
    listed: dict[Any, Any] = {row.id: row for row in pairs.itertuples() if row.id in texts}
    drawn = set(sample)
    suspects = [name for name in listed if name not in drawn]
    known = int(pairs["flipped"].notna().sum())
    numbers = {
        "training pairs": f"{len(pairs):,}",
        f"suspect labels (P(wrong) above {findings.threshold:g})": f"{findings.suspects:,} "
        f"({findings.suspects / len(pairs):.1%})",
        "expected share of wrong labels": share_in_words(findings.share),
        "the same by Hölder-DPO's estimator, which takes sigmoid(u) to be near 0 or 1": (
            f"{findings.share.holder:.1%}"
        ),
    }
    if known:
        wrong = int(pairs["flipped"].sum())
        told = "known to be wrong" if known == len(pairs) else f"known to be wrong, of {known:,} known"
        numbers[told] = f"{wrong:,} ({wrong / known:.1%})"
    common = traits_in_words(traits, findings.groups, findings.doubted[0])
    body = [
        f"<h1>Label audit of <code>{as_text(run)}</code></h1>",
        '<ul class="numbers">',
        *(f"<li><b>{escape(value)}</b>{escape(name)}</li>" for name, value in numbers.items()),
        "</ul>",
        *(f"<p>{as_text(note)}</p>" for note in notes),
        '<div class="figures">',
        _image(distribution(findings), "Distribution of the score with the threshold"),
        _image(against(findings), "Share of labels against the policy by how sure it is, with the fit"),
        "</div>",
        "<h2>How the threshold was chosen</h2>",
        *(f"<p>{as_text(sentence)}</p>" for sentence in sentences(findings)),
        f"<h2>What {findings.doubted[0]} have in common</h2>",
        *(f"<p><strong>{as_text(rule)}</strong></p>" for rule in rules_in_words(traits, findings.share)),
        *(f"<p>{as_text(sentence)}</p>" for sentence in common),
        *traits_table(traits),
        "<h2>What each score found</h2>",
        *methods_table(findings.methods, bool(known)),
        *(
            line
            for name, groups in findings.groups.groupby("grouping", sort=False)
            for line in (f"<h2>By {name}</h2>", *groups_table(groups, bool(known)))
        ),
        *(_NO_SCRIPT if listed else ()),
        *(_SAMPLE if sample else ()),
        *(sampled(listed[name], texts[name], i, len(sample)) for i, name in enumerate(sample, 1)),
        f"<h2>The {len(suspects)} most suspect labels{', but for those above' if sample else ''}</h2>",
        *(suspect(listed[name], texts[name]) for name in suspects),
    ]
    script = _part("report.js")
    return _PAGE.format(
        title=f"Label audit of {as_text(run)}",
        style=_part("report.css"),
        # No other script runs, whatever stands in a row.
        digest=b64encode(sha256(script.encode()).digest()).decode(),
        labels=content_key(sorted(zip(pairs["id"], pairs["observed"], strict=True))),
        script=script,
        body="\n".join(body),
    )


def _part(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _image(png: str, alt: str) -> str:
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{png}">'
