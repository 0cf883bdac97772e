"""What an audit says in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .findings import Findings
from .findings_in_words import COIN_FLIPS, fit_in_words, holder_in_words, share_in_words
from .scorers import NAMES
from .traits_in_words import rules_in_words, traits_in_words


def show(
    console: Console, findings: Findings, traits: pd.DataFrame, folder: Path, notes: Iterable[str]
) -> None:
    """Prints what each score found, the expected share with its doubts, and where the rest is.

    Args:
        console: where to.
        findings: what was found.
        traits: of ``suspect_traits``.
        folder: of the files.
        notes: further sentences on the pairs.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("score")
    forms = {
        "suspects": "{:,}",
        "expected": "{:.1%}",
        "precision": "{:.2f}",
        "recall": "{:.2f}",
        "auroc": "{:.2f}",
        "average_precision": "{:.2f}",
    }
    forms = {name: form for name, form in forms.items() if findings.methods[name].notna().any()}
    headings = {"auroc": "AUROC", "average_precision": "AP"}
    for name in forms:
        table.add_column(headings.get(name, name), justify="right")
    for row in findings.methods.to_dict("records"):
        cells = ("-" if pd.isna(row[name]) else form.format(row[name]) for name, form in forms.items())
        table.add_row(row["method"], *cells)
    console.print(table)
    for name, share in findings.shares.items():
        console.print(
            f"Expected share of wrong labels by {NAMES[name]}: {share_in_words(share)}.", highlight=False
        )
    if not findings.share.identified:
        untold = "--fallback_share" if findings.share.separates else "--share"
        console.print(
            "So no label is suspect. To go on, read a random sample (--sample 50, then --decisions FILE), or "
            f"tell the share: --share where you know it, {untold} 0.45 where you do not. The ranking stands "
            "without it.",
            highlight=False,
            style="yellow",
        )
    if findings.share.known and not findings.share.separates:
        console.print(COIN_FLIPS, highlight=False, style="yellow")
    console.print(holder_in_words(findings.share), highlight=False, style="dim")
    if findings.share.fit.refused:
        console.print(fit_in_words(findings.share), highlight=False, style="yellow")
    for sentence in rules_in_words(traits, findings.share, shown=3):
        console.print(sentence, highlight=False, markup=False, style="yellow")
    for sentence in traits_in_words(traits, findings.groups, findings.doubted[0], shown=3):
        console.print(sentence, highlight=False, markup=False)
    for note in notes:
        console.print(f"  {note}", highlight=False, markup=False, style="dim")
    console.print(
        f"How that came about, and the most suspect pairs: {folder / 'report.html'}; every pair, by rank: "
        f"{folder / 'pairs.csv'} and .parquet",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
