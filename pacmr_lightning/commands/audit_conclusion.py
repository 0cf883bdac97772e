"""The end of ``pacmr audit`` and ``audit-model``: tables, report and terminal, from all pairs' scores."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.console import Console

from ..audit.scorers import Scorer
from ..datamodules.chat import decode_messages
from ..datamodules.cleaned import write_cleaned
from ..datamodules.prompts import split_row
from ..datamodules.sources import Source
from ..evaluation.conversation import message_text
from ..files import replacing
from .audit_options import Wanted

if TYPE_CHECKING:
    from datasets import Dataset

    from ..audit.findings import Findings
    from ..audit.listed_pairs import Texts


@dataclass(frozen=True)
class Judged:
    """Pairs, and who has judged them."""

    pairs: pd.DataFrame
    """As ``findings.find`` takes them."""
    scorer: Scorer
    varies: bool
    """Whether the weights are an opinion of labels."""
    by_heart: bool
    """Whether the judge has learned these labels, and nobody knows how far: the share is too low then."""
    noise_flips: dict[str, bool] | None
    """Whether a run's noise has flipped a label, by id."""


def conclude(
    judged: Judged, rows: Dataset, source: Source, name: str, folder: Path, notes: list[str], wanted: Wanted
) -> pd.DataFrame:
    """Writes an audit's files and shows what was found; returns the rows of ``pairs.parquet``.

    Args:
        judged: N pairs.
        rows: of the data, the pairs among them.
        source: where the rows come from.
        name: of the run or the policy.
        folder: to write to.
        notes: further sentences on the pairs.
        wanted: what is asked for.
    """
    from ..audit.label_studio import tasks
    from ..audit.listed_pairs import random_sample
    from ..audit.report import report
    from ..audit.suspect_traits import suspect_traits
    from ..audit.terminal import show
    from ..audit.traits_in_words import rules

    pairs, decided = judged.pairs, wanted.decided
    findings, sample = _findings(judged, wanted, notes)
    texts = _texts(rows, findings.pairs)
    responses = [text.chosen for text in texts.values()], [text.rejected for text in texts.values()]
    traits = suspect_traits(findings.pairs, findings.doubted[1], *responses)
    known = [column for column in ("category", "annotator") if column in pairs]
    columns = ["rank", "id", *known, "observed", "suggested", "p_wrong", "weight", "u"]
    columns += ["unpulled_u", "delta", "a", "b", "loss", "cross_fit_u", "flipped"]
    table = findings.pairs[
        [name for name in (*columns, "first_visit_u", "probe_u") if name in findings.pairs]
    ]
    table = table if decided is None else decided.follow(table)
    drawn = random_sample(pairs["id"].tolist(), wanted.sample)
    listed = dict.fromkeys([*drawn, *table["id"][: wanted.top]])
    page = report(findings, name, {pair: texts[pair] for pair in listed}, notes, traits, drawn)
    tables = {
        "pairs": table,
        "methods": findings.methods,
        "groups": findings.groups,
        "suspect_traits": traits.assign(rule=rules(traits, findings.share)),
    }
    (folder / "sample.csv").unlink(missing_ok=True)  # of an audit that was told of a sample
    if sample is not None:
        tables["sample"] = sample
    _write(folder, tables, page)
    if wanted.label_studio is not None:
        observed = table.set_index("id")["observed"]
        found = tasks(
            (pair, str(observed[pair]), i < len(drawn), texts[pair]) for i, pair in enumerate(listed)
        )
        with replacing(Path(wanted.label_studio).expanduser()) as temporary:
            temporary.write_text(json.dumps(found, indent=1), encoding="utf-8")
    console = Console()
    show(console, findings, traits, folder, notes)
    if wanted.cleaned is not None:
        drop, exchange = _changes(table, wanted)
        write_corrected(console, judged.noise_flips, source, wanted.cleaned, drop, exchange)
        if wanted.upload.repository is not None:
            noise = judged.noise_flips is not None
            file = Path(wanted.cleaned).expanduser()
            wanted.upload.run(findings, file, source.name, len(drop), len(exchange), noise)
            console.print(f"Uploaded to {wanted.upload.repository}.", highlight=False, soft_wrap=True)
    return table


def _findings(judged: Judged, wanted: Wanted, notes: list[str]) -> tuple[Findings, pd.DataFrame | None]:
    """What is found with the share that is told, by the caller or a sample that was read, or else estimated.

    Returns:
        The findings, and what the sample says beside the audit's own estimate where one was read; ``notes``
        gets what a reader has to know of the share.
    """
    from ..audit.findings import find

    pairs, share, fallback_share = judged.pairs, wanted.share, wanted.fallback_share
    asked = (pairs, judged.scorer, wanted.threshold, judged.varies)
    read = None if wanted.decided is None else wanted.decided.share
    sample: pd.DataFrame | None = None
    if read is None or not read.read:
        findings = find(*asked, share)
    else:
        findings = find(*asked)
        share = read.told if share is None else share
        notes.extend(read.sentences(findings.share, share))
        sample = read.table(findings.share)
        if share is not None:
            findings = find(*asked, share)
    needed = share is None and (judged.by_heart or not findings.share.identified)
    told = share is not None or (needed and fallback_share is not None)
    if told and not findings.share.separates and not pairs["unpulled_u"].equals(pairs["u"]):
        pairs["unpulled_u"] = pairs["u"]  # what the labels have added is all there is
        findings = find(*asked, share)
    # Scores that are no better than coin flips tell labels apart at no share.
    assumed = fallback_share if needed and findings.share.separates else None
    if assumed is not None:
        share = assumed if judged.by_heart else min(assumed, findings.share.at_most)
        findings = find(*asked, share)
        why = f", the most that the surest tenth of the pairs leaves ({assumed:g} was to be taken)"
        notes.append(
            f"The share of wrong labels cannot be told from these scores; it is taken for {share:.3g}"
            f"{why if share < assumed else ''}."
        )
        taken = {name: replace(by_name, assumed=True) for name, by_name in findings.shares.items()}
        findings = replace(findings, shares=taken)
    return findings, sample


def _changes(table: pd.DataFrame, wanted: Wanted) -> tuple[set[str], set[str]]:
    """Ids of pairs to drop, and to exchange: suspects, unless a person has decided on them."""
    suspects = set(table["id"][table["suggested"] == "flip"])
    drop = suspects if wanted.action == "drop" else set()
    exchange = suspects if wanted.action == "flip" else set()
    if wanted.decided is None:
        return drop, exchange
    keep, wrong, out = map(wanted.decided.named, ("keep", "exchange", "drop"))
    return drop - keep - wrong | out, exchange - keep - out | wrong


def _texts(rows: Dataset, table: pd.DataFrame) -> dict[str, Texts]:
    """Prompts and responses of the pairs of a table by id and in its order, labels as trained."""
    from ..audit.listed_pairs import Texts

    places = {name: i for i, name in enumerate(rows["id"][:])}
    # One read of them all: a row at a time takes several times as long.
    found = rows.select([places[name] for name in table["id"]]).to_dict()
    texts: dict[str, Texts] = {}
    for i, (name, observed) in enumerate(zip(table["id"], table["observed"], strict=True)):
        split = split_row(*(found[column][i] for column in ("prompt", "chosen", "rejected", "chat")))
        prompt = split.prompt
        if found["chat"][i]:
            prompt = "\n\n".join(f"{m['role']}: {message_text(m)}" for m in decode_messages(prompt))
            if tools := found["tools"][i]:
                prompt = f"tools: {tools}\n\n{prompt}"
        responses = (split.chosen, split.rejected)
        texts[name] = Texts(prompt, *(responses if observed == "chosen" else responses[::-1]))
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
    console: Console,
    noise_flips: dict[str, bool] | None,
    source: Source,
    output: str,
    drop: set[str],
    exchange: set[str],
) -> None:
    """The cleaned pairs, which start from the labels as trained; no pair is dropped and exchanged."""
    swapped = {name for name, flip in (noise_flips or {}).items() if flip}
    rows = write_cleaned(source, output, drop, (swapped - drop) ^ exchange)
    changes = ((drop, "dropped"), (exchange, "exchanged"))
    done = " and ".join(f"{len(names):,} suspect labels {word}" for names, word in changes if names)
    trained = (
        " Its labels are those that the run was trained on, its noise included, before these were "
        "changed; train on it without noise options."
        if noise_flips is not None
        else ""
    )
    console.print(
        f"{output}: {rows:,} rows, {done or '0 suspect labels changed'}.{trained}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
