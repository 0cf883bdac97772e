"""Command ``pacmr audit``: suspected label errors of preference pairs, and cleaned pairs."""

from typing import Any

import pandas as pd
from rich.console import Console

from ..audit import AuditOptions, AuditResult, words
from ..audit import audit as look_for_wrong_labels
from ..audit.scorers import NAMES
from ..command_line.output import plain_table, print_result
from ..datamodules.sources import Source
from ..evaluation import reward_model  # noqa: F401 - for its judge's short name


def audit(run: str, source: Source | None = None, **options: Any) -> None:
    """Finds suspected label errors in preference pairs, and writes the pairs without them.

    pacmr audit MODEL --data FILE needs no training: a linear probe on the base model scores each label. FILE
    (JSON Lines, Parquet) or a Hub dataset has the columns prompt, chosen and rejected.
    pacmr audit RUN audits the training pairs of a finished run, and pacmr audit ADAPTER --data FILE those of
    a policy that was trained elsewhere.

    With --judges+=EndpointJudge a language model is asked about the most uncertain pairs, and its votes are
    combined with the score. The cost is printed first, answers are kept, and the same command resumes.

    Results are in the folder audit (--output names another): cleaned.jsonl without the suspected label
    errors, for any trainer; report.html; pairs.csv and pairs.parquet by rank; methods.csv, groups.csv and
    shortcuts.csv. docs/files.md explains them.

    Args:
        run: folder of a preference run; with pairs, folder or Hub id of a base model or PEFT adapter.
        source: another source of pairs, as in pacmr fit; --data FILE is --source Files --source.train FILE.
        options: of the audit.

    Raises:
        UserError: options do not fit, or files are missing or do not fit.
    """
    show(look_for_wrong_labels(run, source, AuditOptions(**options)))


def show(found: AuditResult) -> None:
    """Print the result, the table of scores, what limits them, and the files."""
    console, findings = Console(), found.findings
    print_result(found.statement)
    for sentence in (words.known_in_words(findings), words.flips_in_words(findings.agreement)):
        if sentence:
            print_result(sentence)
    methods = findings.methods
    own = methods["method"] == NAMES[findings.scorer]
    _show_table(words.methods_table(methods[own | (methods["suspected"] > 0) | methods["auroc"].notna()]))

    def say(text: str, style: str | None = None, **options: Any) -> None:
        console.print(text, highlight=False, markup=False, style=style, **options)

    if "judges.csv" in found.files:
        _show_table(words.judges_table(pd.read_csv(found.files["judges.csv"])))
    if not findings.agreement.usable:
        say(
            "Use a larger model or more pairs, let language models vote (--judges), or read a random sample "
            "(--sample 50). With a known rate of random flips, --noise_rate RATE marks labels all the same.",
            "yellow",
        )
    elif not findings.agreement.predicts:
        say(
            "These labels cannot be predicted from the scores better than by a coin, so p may carry no "
            "information.",
            "yellow",
        )
    for sentence in words.shortcuts_in_words(found.shortcuts):
        say(sentence, "yellow")
    for note in found.notes:
        say(f"  {note}", "dim")
    say(
        f"Report: {found.files['report.html']}; all pairs by rank: {found.files['pairs.csv']} and .parquet",
        soft_wrap=True,
    )
    if found.cleaned is not None:
        say(found.cleaned, soft_wrap=True)


def _show_table(shown: words.Table) -> None:
    table = plain_table(*shown.heading)
    for row in shown.rows:
        table.add_row(*row)
    print_result(table)
