"""What an audit writes and shows, whoever has judged the pairs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pandas as pd
from rich.console import Console

from ..datamodules.chat import decode_messages
from ..datamodules.cleaned import write_cleaned
from ..datamodules.prompts import split_row
from ..datamodules.reading import numbered_rows
from ..datamodules.sources import Source
from ..errors import UserError
from ..files import replacing
from ..runs.hub import check_repository, push

if TYPE_CHECKING:
    from datasets import Dataset

    from ..audit.findings import Findings
    from ..audit.report import Texts

Action = Literal["drop", "flip"]


@dataclass(frozen=True)
class Wanted:
    """What is asked of an audit, whoever judges; see ``audit``.

    Raises:
        UserError: an option is out of range.
    """

    top: int
    threshold: float
    share: float | None
    fallback_share: float | None
    cleaned: str | None
    action: Action | None
    push_cleaned: str | None = None
    private: bool = False
    command: str = ""
    """That asks for all this, as a card may show it."""

    def __post_init__(self) -> None:
        if self.top < 0:
            raise UserError(f"top is {self.top}, but it is a number of pairs, at least 0.")
        if not 0 < self.threshold < 1:
            raise UserError(f"threshold is {self.threshold}, but it is a probability, above 0 and below 1.")
        for name in ("share", "fallback_share"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 0.5:
                raise UserError(f"{name} is {value}, but the share of wrong labels is above 0 and below 0.5.")
        if (self.cleaned is None) != (self.action is None):
            given, other = ("cleaned", "action") if self.action is None else ("action", "cleaned")
            fix = "drop or flip" if self.action is None else "the file to write"
            raise UserError(f"{given} is given without {other}; say with --{other} {fix}.")
        if self.push_cleaned is not None:
            if self.cleaned is None:
                raise UserError("push_cleaned is given without cleaned; name the file with --cleaned.")
            check_repository(self.push_cleaned, "push_cleaned")
        elif self.private:
            raise UserError("private is given without push_cleaned; name the repository, or leave it out.")


@dataclass(frozen=True)
class Judged:
    """Pairs, and who has judged them."""

    pairs: pd.DataFrame
    """As ``last_pass`` makes them, with ``cross_fit_u`` and ``unpulled_u``, and ``annotator`` where known."""
    scorer: Literal["vnet", "dpo", "policy"]
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
    from ..audit.findings import find
    from ..audit.report import report
    from ..audit.suspect_traits import suspect_traits
    from ..audit.terminal import show

    pairs, share, fallback_share = judged.pairs, wanted.share, wanted.fallback_share
    asked = (pairs, judged.scorer, wanted.threshold, judged.varies)
    findings = find(*asked, share)
    if share is None and fallback_share is not None and (judged.by_heart or not findings.share.identified):
        share = fallback_share if judged.by_heart else min(fallback_share, findings.share.at_most)
        findings = find(*asked, share)
        why = f", the most that the surest tenth of the pairs leaves ({fallback_share:g} was to be taken)"
        notes.append(
            f"The share of wrong labels cannot be told from these scores; it is taken for {share:.3g}"
            f"{why if share < fallback_share else ''}."
        )
    if share is not None and not judged.by_heart and not findings.share.identified:
        pairs["unpulled_u"] = pairs["u"]  # what the labels have added is all there is
        findings = find(*asked, share)
    texts = _texts(rows, findings.pairs)
    responses = [text.chosen for text in texts], [text.rejected for text in texts]
    traits = suspect_traits(findings.pairs, findings.doubted[1], *responses)
    known = [column for column in ("category", "annotator") if column in pairs]
    columns = ["rank", "id", *known, "observed", "suggested", "p_wrong", "weight", "u"]
    table = findings.pairs[[*columns, "unpulled_u", "delta", "a", "b", "loss", "cross_fit_u", "flipped"]]
    page = report(findings, name, texts[: wanted.top], notes, traits)
    tables = {
        "pairs": table,
        "methods": findings.methods,
        "groups": findings.groups,
        "suspect_traits": traits,
    }
    _write(folder, tables, page)
    console = Console()
    show(console, findings, traits, folder, notes)
    if wanted.cleaned is not None and wanted.action is not None:
        suspects = set(table["id"][table["suggested"] == "flip"])
        write_corrected(console, judged.noise_flips, source, wanted.cleaned, wanted.action, suspects)
        if wanted.push_cleaned is not None:
            noise, file = judged.noise_flips is not None, Path(wanted.cleaned).expanduser()
            _push(console, findings, noise, wanted, file, wanted.push_cleaned)
    return table


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
    console: Console,
    noise_flips: dict[str, bool] | None,
    source: Source,
    output: str,
    action: Action,
    suspects: set[str],
) -> None:
    """The cleaned pairs, which start from the labels as trained."""
    swapped = {name for name, flip in (noise_flips or {}).items() if flip}
    drop = suspects if action == "drop" else set()
    flip = swapped - drop if action == "drop" else swapped ^ suspects
    rows = write_cleaned(source, output, drop, flip)
    done = "dropped" if action == "drop" else "exchanged"
    trained = (
        " Its labels are those that the run was trained on, its noise included, before these were "
        f"{done}; train on it without noise options."
        if noise_flips is not None
        else ""
    )
    console.print(
        f"{output}: {rows:,} rows, {len(suspects):,} suspect labels {done}.{trained}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _push(
    console: Console, findings: Findings, noise: bool, wanted: Wanted, file: Path, repository: str
) -> None:
    """Uploads the cleaned pairs with a card; where that fails, the file stays."""
    from ..audit.dataset_card import dataset_card

    rows, columns = 0, dict[str, None]()
    for _, row in numbered_rows(file):
        rows += 1
        columns |= dict.fromkeys(row)
    done = "left out" if wanted.action == "drop" else "exchanged: chosen and rejected have changed places"
    trained = " The labels before were those that a run was trained on, the noise that it injected included."
    card = dataset_card(
        findings,
        name=repository.rpartition("/")[2],
        file=file.name,
        columns=list(columns),
        rows=rows,
        changed=f"Suspect labels were {done}.{trained if noise else ''}",
        command=wanted.command,
    )
    with tempfile.TemporaryDirectory() as folder:
        readme = Path(folder, "README.md")
        readme.write_text(card, encoding="utf-8")
        try:
            push({"README.md": readme, file.name: file}, repository, "dataset", wanted.private)
        except UserError as error:
            raise UserError(f"{error} {file} is kept.") from None
    console.print(f"Uploaded to {repository}.", highlight=False, markup=False, soft_wrap=True)
