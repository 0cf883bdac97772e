"""Names the labels of a run's training pairs that look wrong, and writes the pairs without them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from rich.console import Console

from ..command_line.parser import run_tool
from ..datamodules.chat import decode_messages
from ..datamodules.cleaned import check_output, write_cleaned
from ..datamodules.prompts import split_row
from ..errors import UserError
from ..files import replacing
from ..modules import PreferenceModule
from ..runs.finished_run import PreferenceData, find_run, load
from ..weighting import AuditedWeights, DropFlipped, OracleWeights

if TYPE_CHECKING:
    from datasets import Dataset

    from ..audit.report import Texts

Action = Literal["drop", "flip"]


def audit(
    run: str,
    scorer: Literal["vnet", "dpo", "policy"] | None = None,
    output: str | None = None,
    checkpoint: str = "last",
    top: int = 50,
    threshold: float = 0.5,
    share: float | None = None,
    fallback_share: float | None = None,
    cleaned: str | None = None,
    action: Action | None = None,
    micro_batch_size: int | None = None,
) -> pd.DataFrame:
    """Looks at all training pairs of a finished run once more, labels as trained.

    Writes ``pairs.parquet`` and ``pairs.csv`` (one row a pair, the most suspect first), ``methods.csv`` (what
    each score found), ``groups.csv`` (how reliable each category's and annotator's labels are),
    ``suspect_traits.csv`` (what suspects have in common) and ``report.html``. What a model computed or
    learned stays in ``audit`` inside the run's folder, so that a second call goes on where the first was
    killed.

    Args:
        run: folder of a preference run.
        scorer: who judges: "vnet" is the run's own weights, "dpo" two DPO policies, trained for it on half of
            the prompts each, about the half that they have not seen, "policy" the run's own policy.
            Default: the weights where they differ, else "dpo".
        output: folder to write to; default: ``audit`` inside the run's folder.
        checkpoint: which of the folder ``checkpoints``, by its name without .ckpt.
        top: pairs in the report.
        threshold: a label is suspect where it is wrong with a probability above this.
        share: of wrong labels, where it is known, say from a sample read by hand; default: estimated, which
            fails where the policy has learned too little.
        fallback_share: of wrong labels, where the estimate fails or would be too low, since the policy has
            learned its labels by heart; less where so few labels are against the policy on the pairs that it
            is surest of that no such share of independent flips can be among them.
        cleaned: file to write the training pairs to, in the format of the run's data.
        action: what is done there with suspects: "drop" them, or "flip" their label.
        micro_batch_size: pairs in one forward pass; default: that of training, or 32 where that has none.

    Returns:
        The rows of ``pairs.parquet``.

    Raises:
        UserError: an option is out of range, the run's files are missing or do not fit, or the run has no
            scorer of the kind.
    """
    _check(top, threshold, share, fallback_share, cleaned, action, micro_batch_size)
    # scikit-learn and matplotlib are loaded here so that pacmr --help stays quick.
    from ..analysis.last_pass import last_pass
    from ..audit.cross_fit import FOLDER, CrossFit
    from ..audit.findings import find
    from ..audit.own_pull import own_pull
    from ..audit.report import report
    from ..audit.suspect_traits import suspect_traits
    from ..audit.terminal import show

    found = find_run(run, checkpoint)
    module, data, updates = load(found, as_trained=True)
    data.setup("fit")
    if cleaned is not None:
        check_output(data.source, cleaned)
    kept = Path(run) / "audit"
    pairs = last_pass(module, data.train_pairs, kept / "answers.sqlite", micro_batch_size=micro_batch_size)
    who = data.annotators
    if who is not None:
        pairs.insert(list(pairs.columns).index("category") + 1, "annotator", pairs["id"].map(who))
    varies = _varies(module, pairs)
    if scorer == "vnet" and not varies:
        raise UserError(
            f"scorer is vnet, but the weights of {type(module.weighting).__name__} say nothing that it has "
            "found out of labels; use --scorer dpo."
        )
    unit = own_pull(module, data, found, updates)
    pairs["unpulled_u"] = pairs["u"] - (unit or 0) * pairs.pop("pull")
    beta = module.objective.beta
    del module  # the other policies need its memory
    cross_fit = CrossFit(found, data, updates, beta, kept / FOLDER, micro_batch_size)
    scorer = scorer or ("vnet" if varies else "dpo")
    u = cross_fit.u() if scorer == "dpo" else cross_fit.kept()
    pairs.insert(list(pairs.columns).index("loss"), "cross_fit_u", np.nan if u is None else u.to_numpy())
    rows = data.source.load("train")
    findings = find(pairs, scorer, threshold, varies, share)
    notes = _notes(found.noise, data)
    by_heart = scorer != "dpo" and unit is None
    if share is None and fallback_share is not None and (by_heart or not findings.share.identified):
        taken = fallback_share if by_heart else min(fallback_share, findings.share.at_most)
        findings = find(pairs, scorer, threshold, varies, taken)
        if unit is not None and not findings.share.identified:  # what the labels have added is all there is
            pairs["unpulled_u"] = pairs["u"]
            findings = find(pairs, scorer, threshold, varies, taken)
        why = f", the most that the surest tenth of the pairs leaves ({fallback_share:g} was to be taken)"
        notes.append(
            f"The share of wrong labels cannot be told from these scores; it is taken for {taken:.3g}"
            f"{why if taken < fallback_share else ''}."
        )
    texts = _texts(rows, findings.pairs)
    responses = [text.chosen for text in texts], [text.rejected for text in texts]
    traits = suspect_traits(findings.pairs, findings.doubted[1], *responses)
    known = ["category"] if who is None else ["category", "annotator"]
    columns = ["rank", "id", *known, "observed", "suggested", "p_wrong", "weight", "u"]
    table = findings.pairs[[*columns, "unpulled_u", "delta", "a", "b", "loss", "cross_fit_u", "flipped"]]
    folder = Path(output) if output else kept
    page = report(findings, run, texts[:top], notes, traits)
    tables = {
        "pairs": table,
        "methods": findings.methods,
        "groups": findings.groups,
        "suspect_traits": traits,
    }
    _write(folder, tables, page)
    console = Console()
    show(console, findings, traits, folder, notes)
    if cleaned is not None and action is not None:
        suspects = set(table["id"][table["suggested"] == "flip"])
        write_corrected(console, data, cleaned, action, suspects)
    return table


def _check(
    top: int,
    threshold: float,
    share: float | None,
    fallback_share: float | None,
    cleaned: str | None,
    action: Action | None,
    micro_batch_size: int | None,
) -> None:
    if top < 0:
        raise UserError(f"top is {top}, but it is a number of pairs, at least 0.")
    if not 0 < threshold < 1:
        raise UserError(f"threshold is {threshold}, but it is a probability, above 0 and below 1.")
    for name, value in (("share", share), ("fallback_share", fallback_share)):
        if value is not None and not 0 < value < 0.5:
            raise UserError(f"{name} is {value}, but the share of wrong labels is above 0 and below 0.5.")
    if (cleaned is None) != (action is None):
        given, other = ("cleaned", "action") if action is None else ("action", "cleaned")
        fix = "drop or flip" if action is None else "the file to write"
        raise UserError(f"{given} is given without {other}; say with --{other} {fix}.")
    if micro_batch_size is not None and micro_batch_size < 1:
        raise UserError(f"micro_batch_size is {micro_batch_size}, but it must be at least 1.")


def _varies(module: PreferenceModule, pairs: pd.DataFrame) -> bool:
    """Whether the weights are an opinion of labels; those that a weighting is told beforehand are none."""
    told = isinstance(module.weighting, (AuditedWeights, DropFlipped, OracleWeights))
    return not told and bool(np.ptp(pairs["weight"]) > 1e-6)


def _notes(noise: str, data: PreferenceData) -> list[str]:
    """What a reader has to know of the pairs."""
    notes = []
    if noise:
        notes.append(
            f"The run flipped labels on purpose ({noise}). Labels are those it was trained on: where the "
            "noise was at work, the suggestion to flip undoes it."
        )
    counts = data.counts["train"]
    if out := counts["rows"] - len(data.train_pairs):
        notes.append(
            f"{out:,} of {counts['rows']:,} rows were not trained on (dropped, or held out) and not audited."
        )
    return notes


def _texts(rows: Dataset, table: pd.DataFrame) -> list[Texts]:
    """Prompts and responses of the pairs of a table, labels as trained."""
    from ..audit.report import Texts

    places = {name: i for i, name in enumerate(rows["id"])}
    texts = []
    for pair in table.itertuples():
        row = rows[places[pair.id]]
        split = split_row(row["prompt"], row["chosen"], row["rejected"], row["chat"])
        prompt = split.prompt
        if row["chat"]:
            prompt = "\n\n".join(f"{m['role']}: {m['content']}" for m in decode_messages(prompt))
        responses = (split.chosen, split.rejected)
        texts.append(Texts(prompt, *(responses if pair.observed == "chosen" else responses[::-1])))
    return texts


def _write(folder: Path, tables: dict[str, pd.DataFrame], page: str) -> None:
    with replacing(folder / "pairs.parquet") as temporary:
        tables["pairs"].to_parquet(temporary, index=False)
    for name, frame in tables.items():
        with replacing(folder / f"{name}.csv") as temporary:
            frame.to_csv(temporary, index=False)
    with replacing(folder / "report.html") as temporary:
        temporary.write_text(page, encoding="utf-8")


def write_corrected(
    console: Console, data: PreferenceData, output: str, action: Action, suspects: set[str]
) -> None:
    """The cleaned pairs, which start from the labels as trained."""
    swapped = {name for name, flip in (data.noise_flips or {}).items() if flip}
    drop = suspects if action == "drop" else set()
    flip = swapped - drop if action == "drop" else swapped ^ suspects
    rows = write_cleaned(data.source, output, drop, flip)
    done = "dropped" if action == "drop" else "exchanged"
    trained = (
        " Its labels are those that the run was trained on, its noise included, before these were "
        f"{done}; train on it without noise options."
        if data.noise_flips is not None
        else ""
    )
    console.print(
        f"{output}: {rows:,} rows, {len(suspects):,} suspect labels {done}.{trained}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def main(arguments: list[str]) -> None:
    """``pacmr audit RUN`` and the options of ``audit``."""
    run_tool("audit", audit, arguments, positional=True)
