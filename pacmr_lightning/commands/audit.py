"""``pacmr audit``: suspected label errors of preference pairs, and cleaned pairs."""

from __future__ import annotations

from typing import Any

import pandas as pd
from rich.console import Console

from ..audit import AuditOptions, AuditResult
from ..audit import audit as look_for_wrong_labels
from ..audit.scorers import NAMES
from ..audit.words import COIN_FLIPS, fit_in_words, rate_in_words, rules_in_words, traits_in_words
from ..command_line.output import print_result
from ..command_line.parser import run_tool
from ..command_line.plain_table import plain_table
from ..datamodules.sources import Source
from ..errors import UserError
from ..runs.hub_upload import check_repository

_FORMS = {
    "suspects": ("suspects", "{:,}"),
    "expected": ("expected", "{:.1%}"),
    "precision": ("precision", "{:.2f}"),
    "recall": ("recall", "{:.2f}"),
    "auroc": ("AUROC", "{:.2f}"),
    "average_precision": ("AP", "{:.2f}"),
}


def audit(
    run: str,
    source: Source | None = None,
    push_cleaned: str | None = None,
    private: bool = False,
    **options: Any,
) -> None:
    """Finds label errors in preference pairs: by a run, an adapter, or a base model without training.

    A run has its pairs: pacmr audit RUN. A model needs them: pacmr audit MODEL --data FILE, where FILE (JSON
    Lines, Parquet) or a Hub dataset has the columns prompt, chosen and rejected. audit/cleaned.jsonl has the
    pairs without suspected label errors, for any trainer (--output names another folder).

    Writes ``pairs.parquet`` and ``pairs.csv`` (one row a pair, the most suspect first), ``methods.csv`` (each
    score's results), ``groups.csv`` (reliability of each category's and annotator's labels),
    ``suspect_traits.csv`` (what suspects have in common) and ``report.html``. Results of models stay in
    ``audit`` inside the run's folder, so that a second call resumes.

    With ``source`` the pairs are audited by a policy that was trained elsewhere, or by a model that is to be
    trained. A policy that was trained on these labels agrees with them too much, so the share of wrong ones
    is likely to be higher than estimated; the ranking is still of use. A linear probe (``scorer`` probe)
    needs no training: it learns from the model's hidden states and the labels of other prompts.
    ``AuditedWeights`` can learn from the table.

    Args:
        run: folder of a preference run; with ``source``, folder or Hub id of a PEFT adapter or a whole model.
        source: of pairs for a model, as in pacmr fit: --data FILE is --source Files --source.train FILE.
        push_cleaned: repository at the Hugging Face Hub, OWNER/NAME, to upload ``cleaned`` to as a dataset,
            with a card; made where it does not exist. The token is that of HF_TOKEN, or of hf auth login.
        private: make a private repository.
        options: of the audit.

    Raises:
        UserError: options do not fit, files are missing or do not fit, or the Hub refuses the upload.
    """
    asked = AuditOptions(**options)
    if push_cleaned is not None:
        if asked.cleaned is None:
            raise UserError("push_cleaned is given without cleaned; name the file with --cleaned.")
        check_repository(push_cleaned, "push_cleaned")
    elif private:
        raise UserError("private is given without push_cleaned; name the repository, or leave it out.")
    found = look_for_wrong_labels(run, source, asked)
    show(found)
    if push_cleaned is not None:
        found.push(push_cleaned, private)
        print(f"Uploaded to {push_cleaned}.")


def show(found: AuditResult) -> None:
    """Print each score's results, the noise rate with its limits, and the files."""
    console, findings = Console(), found.findings
    table = plain_table()
    table.add_column("score")
    columns = [name for name in _FORMS if findings.methods[name].notna().any()]
    for name in columns:
        table.add_column(_FORMS[name][0], justify="right")
    for row in findings.methods.to_dict("records"):
        cells = ("-" if pd.isna(row[name]) else _FORMS[name][1].format(row[name]) for name in columns)
        table.add_row(row["method"], *cells)
    print_result(table)

    def say(text: str, style: str | None = None, **options: Any) -> None:
        console.print(text, highlight=False, markup=False, style=style, **options)

    rate = findings.rate
    for scorer, by_scorer in findings.rates.items():
        print_result(f"Expected share of wrong labels by {NAMES[scorer]}: {rate_in_words(by_scorer)}.")
    if not rate.identified:
        untold = "--fallback_share" if rate.separates else "--share"
        say(
            "So no label is suspect. To go on, read a random sample (--sample 50, then --decisions FILE), or "
            f"tell the share: --share where you know it, {untold} 0.45 where you do not. The ranking stands "
            "without it.",
            "yellow",
        )
    if rate.known and not rate.separates:
        say(COIN_FLIPS, "yellow")
    if rate.fit.refused:
        say(fit_in_words(rate), "yellow")
    for sentence in rules_in_words(found.traits, rate, shown=3):
        say(sentence, "yellow")
    for sentence in traits_in_words(found.traits, findings.groups, findings.doubted[0], shown=3):
        print_result(sentence)
    for note in found.notes:
        say(f"  {note}", "dim")
    say(
        f"Report with the most suspected pairs: {found.files['report.html']}; all pairs by rank: "
        f"{found.files['pairs.csv']} and .parquet",
        soft_wrap=True,
    )
    if found.cleaned is not None:
        say(found.cleaned.sentence, soft_wrap=True)


def main(arguments: list[str]) -> None:
    """Run ``pacmr audit``."""
    run_tool("audit", audit, arguments, positional=True)
