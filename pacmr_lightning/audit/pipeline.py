"""The whole audit: scores, p, findings and files."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..datamodules import PreferenceDataModule, Source, pairs_of
from ..datamodules.reading import readable_texts
from ..errors import UserError, check_is
from ..files import check_writable, expanded, local_path, write_frame, write_text
from ..modules import PreferenceModule
from ..modules.schedule import datamodule
from ..policy.hub_access import similar_folder
from ..runs.folder import AUDIT, AUDITED_PAIRS, CONFIG
from ..waiting import waiting
from .agreement import agreement
from .asking import ANSWERS, ask_judges, pairs_to_judge, reliability_of_judges
from .combination import ENOUGH, VIEWS, combined_score
from .html_report import html_report
from .manual_review import Decisions, Texts, random_sample, settled, undecided
from .options import OF_A_MODEL, OF_A_RUN, AuditOptions
from .scored_pairs import ScoredPairs, refuse_own, score_fit, score_model, score_run
from .scorers import NAMES, SCORES, VOTE, Scorer
from .shortcuts import shortcuts
from .suspected import Findings, find
from .words import verdict


@dataclass(frozen=True)
class AuditResult:
    """Results of an audit, and its files."""

    table: pd.DataFrame
    """One row per pair, the most suspected first: ``pairs.parquet``."""
    findings: Findings
    shortcuts: pd.DataFrame
    """Length and words that most labels follow."""
    notes: list[str]
    files: dict[str, Path]
    """Written files by name, ``cleaned`` among them."""
    cleaned: str | None
    """Number of rows and changes in the file of cleaned pairs, in a sentence; None without a file."""
    texts: Callable[[str], Texts]
    """Returns the texts of a pair by its id."""

    @property
    def suspected(self) -> pd.DataFrame:
        """Suspected label errors that are not decided: ``id``, ``p``, ``suggested``; lowest p first."""
        return self.table.loc[undecided(self.table), ["id", "p", "suggested"]].reset_index(drop=True)

    @property
    def noise_rate(self) -> float | None:
        """Estimated or given rate of random flips; None if not identified (see ``statement``)."""
        fit = self.findings.agreement
        return fit.rate if fit.identified else None

    @property
    def statement(self) -> str:
        """How many labels another annotator would contradict, or that they cannot be predicted."""
        return verdict(self.findings)

    def with_texts(self) -> pd.DataFrame:
        """Return ``suspected`` with the texts ``prompt``, ``chosen`` and ``rejected``, labels as trained."""
        suspected = self.suspected
        texts = [vars(self.texts(name)) for name in suspected["id"]]
        return suspected.join(pd.DataFrame(texts, columns=["prompt", "chosen", "rejected"]))


def audit(
    run: str | Path | PreferenceModule,
    source: Source | str | Path | PreferenceDataModule | None = None,
    options: AuditOptions | None = None,
) -> AuditResult:
    """Find suspected label errors among the training pairs of a finished run, or the pairs of a source.

    Writes ``pairs.parquet``, ``report.html`` and CSV tables; see docs/audit.md. Here a quarter of the pairs
    prefer "hollow" to "golden":

    >>> found = audit("model", "pairs.jsonl")
    Tokenizer and chat template: model
    pairs.jsonl, audited: 240 of 240 pairs kept
    >>> print(found.statement)  # doctest: +ELLIPSIS
    A second annotator would probably contradict 60 of 240 labels. Of these suspected labels ...
    >>> list(found.suspected)  # the columns of a DataFrame, the most suspected label first
    ['id', 'p', 'suggested']
    >>> found.with_texts().set_index("id").loc["44", ["chosen", "rejected"]].to_dict()
    {'chosen': ' a hollow 4', 'rejected': ' a golden 2'}

    Args:
        run: folder of a finished run of ``pacmr fit``, labels as trained; with a source, folder or Hub id of
            a model: a PEFT adapter or a whole model; with a datamodule, the module that was fitted on it.
        source: pairs for a model: a file (JSON Lines, Parquet), the id of a dataset on the Hub, or a
            ``datamodules.Source``. For a module, its datamodule.
        options: see ``AuditOptions``.

    Raises:
        UserError: options do not fit, or files are missing or do not fit.
    """
    options = AuditOptions() if options is None else options
    check_is(AuditOptions, "an AuditOptions", options=options)
    if isinstance(run, PreferenceModule):
        return _audit_fit(run, source, options)
    check_is((str, Path), "a folder, a Hub id or a fitted PreferenceModule", run=run)
    if isinstance(source, PreferenceDataModule):
        raise UserError(f"source is a datamodule, but run is {run}; give the module that was fitted on it.")
    run = str(expanded(run))
    is_run = (Path(run) / CONFIG).is_file()
    if source is not None and is_run:
        sft = Path(run) / "model"
        hint = f"name its model, {sft}" if sft.is_dir() else "leave it out"
        raise UserError(f"source is given, but {run} is a run, which has its own pairs; {hint}.")
    if source is None and not is_run and any(Path(run).glob("*config.json")):
        raise UserError(f"{run} is a model and no run; give the pairs, as in --data pairs.jsonl.")
    if source is None and not Path(run).is_dir():
        near = similar_folder(Path(run))
        hint = f"did you mean {near}?" if near else "give the pairs, as in --data pairs.jsonl, for a model."
        raise UserError(f"There is no folder {run} of a run; {hint}")
    source = None if source is None else pairs_of(source)
    folder = local_path(options.output or (AUDIT if source is not None else Path(run) / AUDIT))
    check_writable("output", str(folder), folder)
    options = replace(options, output=str(folder))
    scored = score_run(run, options) if source is None else score_model(run, source, options)
    answers = (folder if source is not None else Path(run) / AUDIT) / ANSWERS
    return conclude(scored, run, folder, options, answers)


def _audit_fit(module: PreferenceModule, data: Any, options: AuditOptions) -> AuditResult:
    """Audit the training pairs of a module that a Python program has fitted."""
    trainer = None
    with suppress(RuntimeError):  # Lightning's, without a trainer
        trainer = module.trainer
    if trainer is None or data is None or data is not datamodule(trainer) or data.train_pairs is None:
        raise UserError(
            "A module is audited with the datamodule of its fit, in the same program; call "
            "audit(module, datamodule) after trainer.fit."
        )
    if trainer.world_size > 1:
        raise UserError(
            f"The trainer has {trainer.world_size} processes, but an audit of a module runs in one; save the "
            "adapter and call pacmr audit ADAPTER --data FILE."
        )
    options.refuse((*OF_A_MODEL, *OF_A_RUN), "a module is audited as it is, with its datamodule's pairs")
    if options.score == "dpo":
        raise UserError("scorer is dpo, which needs a run of pacmr fit; use probe or policy for a module.")
    run = local_path(trainer.default_root_dir)
    folder = local_path(options.output or run / AUDIT)
    check_writable("output", str(folder), folder)
    options = replace(options, output=str(folder))
    noise = "" if data.noise is None else f"{type(data.noise).__name__}, rate {data.noise_rate:g}"
    refuse_own(module, data, run, options)
    before, was_training = data.train_pairs.reference, module.policy.training
    module.weighting.to(torch.device("cpu"))  # where values of pairs are
    try:
        scored = score_fit(module, data, run, options, noise)
    finally:  # another fit may have another reference
        data.train_pairs.reference = before
        module.policy.train(was_training)
    return conclude(scored, str(run), folder, options, run / AUDIT / ANSWERS)


def conclude(
    scored: ScoredPairs, run: str, folder: Path, options: AuditOptions, answers: Path | None = None
) -> AuditResult:
    """Determine p, find suspected label errors and write an audit's files.

    The answers of judges are kept in the file ``answers``; default: in the folder.
    """
    pairs, tied = scored.pairs, scored.pairs["tie"].to_numpy()
    given = options.decided
    scorer = alone = scored.scorer if given is None else _combine(scored, given)
    decided = None if given is None else given.spread(pairs)
    u, prompts = pairs[SCORES[alone]].to_numpy(), pairs["prompt"].to_numpy()
    votes, asking = scored.votes, list[str]()
    with waiting("Estimating how many annotators would agree"):
        if options.judges:
            p = agreement(u, prompts, votes, options.noise_rate, resamples=0).p
            # Rows with votes on one pair have the verdict on its first row, seen from their own label.
            _, rows, pair = np.unique(pairs["pair"], return_index=True, return_inverse=True)
            first = rows[pair]
            rows = rows[pairs["pair"].iloc[rows].isin(pairs["pair"][~tied])]  # ties are never suspected
            places = rows[pairs_to_judge(p[rows], options.judged_pairs)]
            cast, asking = ask_judges(pairs, places, scored.rows, options, answers or folder / ANSWERS)
            side = pairs["side"].to_numpy()
            cast = cast[first] * (side * side[first])[:, None]
            asked = np.isin(first, places)
            for j, column in enumerate(cast.T, 1):  # NA for pairs that no judge was asked about
                pairs[f"{VOTE}{j}"] = pd.Series(column[asked], pairs.index[asked], dtype="Int64")
            votes, scorer = replace(votes, verdicts=cast.astype(float)), "judge"
        fit = agreement(u, prompts, votes, options.noise_rate)
        if options.judges:
            pairs["judged_u"] = fit.margin
        findings = find(pairs, scorer, fit, votes, options.threshold, alone, decided)
    read = "" if decided is None else decided.estimate
    notes = [*scored.notes, *asking, *([read] if read else [])]
    texts = _texts(scored, findings.pairs)
    sides = [[getattr(text, side) for text in texts.values()] for side in ("chosen", "rejected")]
    ties = findings.pairs["tie"].to_numpy()
    told = ~ties | ties.all()
    followed = shortcuts(findings.pairs["prompt"].to_numpy()[told], *(list(compress(s, told)) for s in sides))
    columns = ["rank", "id", "category", "annotator", "observed", "suggested", "p", "p_majority"]
    columns += ["votes_for", "votes_against", "weight", "u", "delta", "a", "b", "loss", "flipped"]
    columns += ["cross_fit_u", "probe_u", *VIEWS, "combined_u", "judged_u"]
    columns += [*pairs.filter(regex=f"^{VOTE}").columns, "texts", "decision"]
    table = findings.pairs[[name for name in columns if name in findings.pairs]]
    drawn = random_sample(pairs["id"][~tied].tolist(), options.sample)
    again = table["id"][table["id"].isin(() if given is None else given.rows)]
    listed = dict.fromkeys([*drawn, *table["id"][~settled(table)][: options.top], *again])
    tables = {"pairs": table, "methods": findings.methods, "groups": findings.groups, "shortcuts": followed}
    if (folder / AUDITED_PAIRS).exists():  # what an earlier audit has left
        for name in ("judges.csv", "cleaned.jsonl", "cleaned.parquet"):
            if (folder / name).resolve() not in [local_path(file).resolve() for file in scored.source.files]:
                (folder / name).unlink(missing_ok=True)
    if options.judges:
        tables["judges"] = reliability_of_judges([judge.name for judge in options.judges], pairs, fit)
    with waiting("Writing the report"):
        shown = {pair: texts[pair] for pair in listed}
        page = html_report(findings, run, shown, notes, followed, drawn, tables.get("judges"))
    files = {name: folder / name for name in (AUDITED_PAIRS, *(f"{name}.csv" for name in tables))}
    for path in files.values():
        write_frame(path, tables[path.stem])
    files["report.html"] = folder / "report.html"
    write_text(files["report.html"], page)
    cleaned, changes = None, _changes(table, options.action, decided)
    # A file without changes is written only if it is asked for.
    output = options.cleaned or (str(folder / scored.source.cleaned_name) if any(changes) else None)
    if output is not None:
        cleaned = _write_cleaned(scored, output, *changes)
        files["cleaned"] = local_path(output)
    return AuditResult(table, findings, followed, notes, files, cleaned, texts.__getitem__)


def _combine(scored: ScoredPairs, decided: Decisions) -> Scorer:
    """Return "combined" with its column if there are ``ENOUGH`` decisions, else the scorer as it is."""
    pairs, name = scored.pairs, NAMES[scored.scorer]
    truth = pairs["id"].map(decided.words).map({"keep": 1, "swap": -1}).fillna(0).to_numpy(dtype=int)
    if (number := np.count_nonzero(truth)) < ENOUGH:
        scored.notes.append(
            f"{number} labels are decided as right or wrong; from {ENOUGH} on they also improve the score."
        )
        return scored.scorer
    others = pairs[list(VIEWS)].to_numpy()
    pairs["combined_u"], w = combined_score(pairs[SCORES[scored.scorer]].to_numpy(), others, truth)
    scored.notes.append(
        f"The score is learned from {number} decisions: {w[0]:.2f} x {name} {w[1]:+.2f} x difference of "
        f"reference log-probabilities {w[2]:+.2f} x length difference, each over its root mean square."
    )
    return "combined"


def _changes(table: pd.DataFrame, action: str | None, decided: Decisions | None) -> tuple[set[str], set[str]]:
    """Ids of pairs to drop, and to swap: suspected label errors, unless decided by hand."""
    suspected = set(table["id"][undecided(table)])
    action = action or ("drop" if decided is None else None)
    drop, swap = (suspected if action == word else set() for word in ("drop", "swap"))
    if decided is None:
        return drop, swap
    return drop | decided.named("drop"), swap | decided.named("swap")


def _texts(scored: ScoredPairs, table: pd.DataFrame) -> dict[str, Texts]:
    texts = readable_texts(scored.rows, table["id"].tolist())
    return {
        name: Texts(prompt, *(sides if observed == "chosen" else sides[::-1]))
        for name, observed, (prompt, *sides) in zip(table["id"], table["observed"], texts, strict=True)
    }


def _write_cleaned(scored: ScoredPairs, output: str, drop: set[str], swap: set[str]) -> str:
    """Write the pairs as trained, some dropped and some with the label swapped; return a sentence on them."""
    flipped = {name for name, flip in (scored.noise_flips or {}).items() if flip}
    rows = scored.source.write_cleaned(output, drop, (flipped - drop) ^ swap)
    changes = ((len(drop), "dropped"), (len(swap), "swapped"))
    done = " and ".join(f"{count:,} labels {word}" for count, word in changes if count)
    said = f"{output}: {rows:,} rows, {done or '0 labels changed'}."
    if scored.noise_flips is not None:
        said += " It contains the label noise that the run injected; train on it without noise options."
    return said
