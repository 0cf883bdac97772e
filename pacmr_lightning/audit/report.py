"""An audit as one HTML file that needs nothing else; whatever stands in a row is shown as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from .figures import against, distribution
from .findings import Findings
from .findings_in_words import sentences, share_in_words
from .report_tables import as_text, groups_table, methods_table, traits_table
from .traits_in_words import rules_in_words, traits_in_words

FOLD = 600
"""Characters of a text that are shown before it has to be unfolded."""


@dataclass(frozen=True)
class Texts:
    """What a pair says, labels as trained."""

    prompt: str
    chosen: str
    rejected: str


_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 72rem;
  margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h1 code { overflow-wrap: anywhere; }
table { border-collapse: collapse; } th, td { padding: .25rem .9rem .25rem 0; text-align: right;
  border-bottom: 1px solid #ddd; vertical-align: top; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; } th { font-weight: 600; }
.numbers { display: flex; flex-wrap: wrap; gap: 1rem; padding: 0; list-style: none; }
.numbers li { border: 1px solid #ddd; border-radius: 6px; padding: .6rem 1rem; max-width: 26rem; }
.numbers b { display: block; font-size: 1.15rem; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; } .figures img { width: 34rem; max-width: 100%; }
article { border: 1px solid #ccc; border-radius: 6px; padding: .8rem 1rem; margin: 1rem 0; }
article > header { color: #555; font-size: .9rem; overflow-wrap: anywhere; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.sides > section { min-width: 0; } h3 { font-size: .9rem; margin: .6rem 0 .2rem; color: #555; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; background: #f6f6f6;
  border-radius: 4px; padding: .4rem .6rem; max-height: 40rem; overflow-y: auto; }
summary { cursor: pointer; } summary .text { display: block; } details[open] summary .text { display: none; }
.note { color: #555; } .wrong { color: #a33c00; font-weight: 600; }
@media (max-width: 48rem) { .sides { grid-template-columns: 1fr; } }
"""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def report(
    findings: Findings, run: str, texts: Sequence[Texts], notes: Iterable[str], traits: pd.DataFrame
) -> str:
    """The page.

    Args:
        findings: what was found.
        run: the run's folder.
        texts: of the first pairs by rank, which are shown.
        notes: further sentences on the pairs.
        traits: what the suspects have in common, as ``suspect_traits`` makes it.
    """
    pairs = findings.pairs
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
        f"<h2>The {len(texts)} most suspect labels</h2>",
        *(_pair(row, text) for row, text in zip(pairs.itertuples(), texts, strict=False)),
    ]
    return _PAGE.format(title=f"Label audit of {as_text(run)}", style=_STYLE, body="\n".join(body))


def _image(png: str, alt: str) -> str:
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{png}">'


def _pair(row: Any, texts: Texts) -> str:
    facts = [f"#{row.rank}", row.id]
    facts += [] if pd.isna(row.category) else [row.category]
    facts += [] if pd.isna(row.p_wrong) else [f"P(wrong) {row.p_wrong:.3f}"]
    facts.append(f"suggestion: {row.suggested}")
    facts += ["exchanged by the run's noise"] if row.observed == "rejected" else []
    facts.append(f"weight {row.weight:.3f}, u {row.u:.2f}")
    facts += [] if pd.isna(row.cross_fit_u) else [f"cross-fitted u {row.cross_fit_u:.2f}"]
    known = (
        "" if pd.isna(row.flipped) else " · the label is wrong" if row.flipped else " · the label is right"
    )
    return "\n".join(
        [
            "<article>",
            f"<header>{as_text(' · '.join(facts))}"
            f"<span{' class=wrong' if known.endswith('wrong') else ''}>{known}</span></header>",
            f"<h3>prompt</h3>{_folded(texts.prompt)}",
            '<div class="sides">',
            f"<section><h3>chosen in training</h3>{_folded(texts.chosen)}</section>",
            f"<section><h3>rejected in training</h3>{_folded(texts.rejected)}</section>",
            "</div>",
            "</article>",
        ]
    )


def _folded(text: str) -> str:
    if len(text) <= FOLD:
        return f'<div class="text" dir="auto">{as_text(text)}</div>'
    start = f'<span class="text" dir="auto">{as_text(text[: FOLD // 2])} …</span>'
    return (
        f"<details><summary>{start}{len(text):,} characters</summary>"
        f'<div class="text" dir="auto">{as_text(text)}</div></details>'
    )
