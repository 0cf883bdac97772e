"""The whole audit: scores, noise rate, findings and files."""

import json
import shutil
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..datamodules import Source, pairs_of
from ..datamodules.row_values import readable_texts
from ..errors import UserError
from ..files import check_writable, content_digest, write_frame, write_json, write_text
from ..hub_access import similar_folder
from ..runs.folder import AUDIT, CHECKPOINTS, CONFIG
from ..waiting import waiting
from .asking import ANSWERS, ask_judges, pairs_to_judge
from .cleaned_file import CleanedFile, upload, write_cleaned_file
from .combination import ENOUGH, VIEWS, combined_score
from .decisions import Texts, random_sample, tasks
from .findings import Findings, find
from .html_report import html_report
from .noise_rate import decide, estimate_noise_rate
from .options import AuditOptions
from .scored_pairs import ScoredPairs, score_model, score_run
from .scorers import BASIS, NAMES, VOTE, Scorer
from .suspect_traits import label_rules, suspect_traits
from .votes import Evidence
from .words import rate_in_words

RECORD = "audit.json"
TABLES = ("pairs.parquet", "pairs.csv", "methods.csv", "groups.csv", "suspect_traits.csv")
_DECISIVE = ("noise_rate", "threshold", "judged_pairs")
"""Options that the table depends on, besides the scorer."""


@dataclass(frozen=True)
class AuditResult:
    """Results of an audit, and its files."""

    table: pd.DataFrame
    """One row per pair, the most suspected first: ``pairs.parquet``."""
    findings: Findings
    traits: pd.DataFrame
    notes: list[str]
    files: dict[str, Path]
    """Written files by name, ``cleaned`` and ``label_studio`` among them."""
    cleaned: CleanedFile | None
    command: str
    """Command line of the audit, without local paths."""

    @property
    def noise_rate(self) -> float | None:
        """Estimated or given noise rate; None if not identified (see ``statement``)."""
        return self.findings.rate.rate if self.findings.rate.identified else None

    @property
    def statement(self) -> str:
        """The noise rate with its uncertainty, or why there is none."""
        return f"Noise rate: {rate_in_words(self.findings.rate)}."

    def _repr_html_(self) -> str:
        """Return the statement and the most suspected pairs, as a notebook shows them."""
        shown = ["rank", "id", "observed", "suggested", "p_wrong", "u"]
        return f"<p>{escape(self.statement)}</p>{self.table[shown].head(10).to_html(index=False)}"

    def push(self, repository: str, private: bool = False) -> None:
        """Upload the cleaned file to the Hugging Face Hub (OWNER/NAME) as a dataset with a card.

        Raises:
            UserError: no cleaned file was written, or the upload fails; the file is kept.
        """
        if self.cleaned is None:
            raise UserError("No cleaned pairs were written; give the audit the option cleaned.")
        upload(self.cleaned, self.findings, self.command, repository, private)


def audit(
    run: str | Path, source: Source | str | Path | None = None, options: AuditOptions | None = None
) -> AuditResult:
    """Find suspected label errors among the training pairs of a finished run, or the pairs of a source.

    Writes ``pairs.parquet``, ``report.html`` and CSV tables; see docs/audit.md.

    Args:
        run: folder of a finished preference run, labels as trained; with a source, folder or Hub id of a
            model: a PEFT adapter or a whole model.
        source: pairs for a model: a file (JSON Lines, Parquet), the id of a dataset on the Hub, or a
            ``datamodules.Source``.
        options: see ``AuditOptions``.

    Raises:
        UserError: options do not fit, or files are missing or do not fit.
    """
    run = str(run)
    options = AuditOptions() if options is None else options
    is_run = (Path(run) / CONFIG).is_file()
    if source is not None and is_run:
        raise UserError(f"source is given, but {run} is a run, which has its own pairs; leave it out.")
    if source is None and not is_run and any(Path(run).glob("*config.json")):
        raise UserError(f"{run} is a model and no run; give the pairs, as in --data pairs.jsonl.")
    if source is None and not Path(run).is_dir():
        near = similar_folder(Path(run))
        hint = f"did you mean {near}?" if near else "give the pairs, as in --data pairs.jsonl, for a model."
        raise UserError(f"There is no folder {run} of a run; {hint}")
    if isinstance(source, (str, Path)):
        source = pairs_of(source)
    folder = Path(options.output or (AUDIT if source is not None else Path(run) / AUDIT))
    check_writable("output", str(folder), folder)
    scored = score_run(run, options) if source is None else score_model(run, source, options)
    command = options.command(run, source)
    answers = (folder if source is not None else Path(run) / AUDIT) / ANSWERS
    result = conclude(scored, run, folder, options, command, answers)
    rate = result.findings.rate
    record: dict[str, Any] = {
        "scorer": result.findings.scorer,
        "alone": scored.scorer,
        "noise_rate": result.noise_rate,
        "assumed": rate.assumed,
    }
    record["options"] = _decisive(options)
    record["checkpoint"] = _digest(run, options)
    write_json(folder / RECORD, record)
    return result


def reuse(run: str, options: AuditOptions) -> dict[str, Any] | None:
    """Copy the files of an audit in a run's folder to ``options.output``, and return its record.

    None where there is no such audit of this checkpoint with these options, or its noise rate is unknown. An
    audit's choice of scorer is kept where ``options`` name none.
    """
    try:
        record: dict[str, Any] = json.loads((Path(run) / AUDIT / RECORD).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    same = record.get("options") == _decisive(options)
    of_scorer = options.score in (None, record["alone"])
    known = record["noise_rate"] is not None and not record["assumed"]
    if not (same and of_scorer and known and record["checkpoint"] == _digest(run, options)):
        return None
    folder = Path(str(options.output))
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*TABLES, "report.html", RECORD, *(("judges.csv",) if options.judges else ())):
        shutil.copyfile(Path(run) / AUDIT / name, folder / name)
    return record


def _decisive(options: AuditOptions) -> dict[str, Any]:
    found = {name: getattr(options, name) for name in _DECISIVE}
    found["decisions"] = None if options.decided is None else options.decided.content
    return found | {"judges": [judge.settings for judge in options.judges or ()]}


def _digest(run: str, options: AuditOptions) -> str | None:
    file = Path(run) / CHECKPOINTS / f"{options.checkpoint}.ckpt"
    return content_digest(file) if file.is_file() else None


def conclude(
    scored: ScoredPairs,
    run: str,
    folder: Path,
    options: AuditOptions,
    command: str = "",
    answers: Path | None = None,
) -> AuditResult:
    """Determine the noise rate, find suspected label errors and write an audit's files.

    The answers of judges are kept in the file ``answers``; default: in the folder.
    """
    pairs, decided = scored.pairs, options.decided
    truth = np.zeros(len(pairs), dtype=int)
    if decided is not None:
        truth = pairs["id"].map(decided.words).map({"keep": 1, "swap": -1}).fillna(0).to_numpy(dtype=int)
    scorer = alone = scored.scorer if decided is None else _combine(scored, truth)
    evidence, asking = _evidence(scored, alone, truth, options, answers or folder / ANSWERS)
    with waiting("Estimating the noise rate"):
        decision = decide(
            pairs,
            scorer,
            options.noise_rate,
            options.fallback_noise_rate,
            scored.memorised,
            None if decided is None else decided.estimate,
            evidence,
        )
        if decision.rate.judged is not None:
            pairs, scorer = pairs.assign(judged_u=decision.rate.judged.log_odds), "judge"
        findings = find(pairs, scorer, decision.rate, options.threshold, scored.varies, alone)
    notes = scored.notes + asking + decision.notes
    texts = _texts(scored, findings.pairs)
    responses = [text.chosen for text in texts.values()], [text.rejected for text in texts.values()]
    with waiting("Comparing suspected with other pairs"):
        traits = suspect_traits(findings.pairs, findings.doubted[1], *responses)
    columns = ["rank", "id", "category", "annotator", "observed", "suggested", "p_wrong", "weight", "u"]
    columns += ["unpulled_u", "delta", "a", "b", "loss", "cross_fit_u", "flipped", "pre_update_u", "probe_u"]
    columns += [*VIEWS, "combined_u", "judged_u", *pairs.filter(regex=f"^{VOTE}").columns, "texts"]
    table = findings.pairs[[name for name in columns if name in findings.pairs]]
    table = table if decided is None else decided.follow(table)
    drawn = random_sample(pairs["id"].tolist(), options.sample)
    listed = dict.fromkeys([*drawn, *table["id"][: options.top]])
    tables = {
        "pairs": table,
        "methods": findings.methods,
        "groups": findings.groups,
        "suspect_traits": traits.assign(rule=label_rules(traits, findings.rate)),
    }
    for name in ("sample", "judges"):
        (folder / f"{name}.csv").unlink(missing_ok=True)  # of an earlier audit
    if decision.rate.judged is not None:
        tables["judges"] = decision.rate.judged.table
    if decision.sample is not None:
        tables["sample"] = decision.sample
    with waiting("Writing the report"):
        page = html_report(findings, run, {pair: texts[pair] for pair in listed}, notes, traits, drawn)
    files = _write(folder, tables, page)
    if options.label_studio is not None:
        observed = table.set_index("id")["observed"]
        keys = table.set_index("id")["texts"]
        found = tasks(
            (pair, str(observed[pair]), i < len(drawn), keys[pair], texts[pair])
            for i, pair in enumerate(listed)
        )
        files["label_studio"] = Path(options.label_studio).expanduser()
        write_text(files["label_studio"], json.dumps(found, indent=1))
    cleaned, changes = None, _changes(table, options)
    # A file without changes is written only if it is asked for.
    output = options.cleaned or (str(folder / scored.source.cleaned_name) if any(changes) else None)
    if output is not None:
        cleaned = write_cleaned_file(scored.noise_flips, scored.source, output, *changes)
        files["cleaned"] = cleaned.path
    return AuditResult(table, findings, traits, notes, files, cleaned, command)


def _combine(scored: ScoredPairs, truth: np.ndarray) -> Scorer:
    """Return "combined" with its column if there are ``ENOUGH`` decisions, else the scorer as it is."""
    pairs, name = scored.pairs, NAMES[scored.scorer]
    if (number := np.count_nonzero(truth)) < ENOUGH:
        scored.notes.append(
            f"{number} labels are decided as right or wrong; from {ENOUGH} on they also improve the score."
        )
        return scored.scorer
    others = pairs[list(VIEWS)].to_numpy()
    pairs["combined_u"], w = combined_score(pairs[BASIS[scored.scorer]].to_numpy(), others, truth)
    scored.notes.append(
        f"The score is learned from {number} decisions: {w[0]:.2f} x {name} {w[1]:+.2f} x difference of "
        f"reference log-probabilities {w[2]:+.2f} x length difference, each over its root mean square."
    )
    return "combined"


def _evidence(
    scored: ScoredPairs, alone: Scorer, truth: np.ndarray, options: AuditOptions, answers: Path
) -> tuple[Evidence | None, list[str]]:
    """Votes and decisions on the pairs, None without any, and notes; adds a column per judge."""
    pairs, judges = scored.pairs, options.judges or []
    if not judges and not truth.any():
        return None, []
    asked = np.zeros(len(pairs), dtype=bool)
    votes, notes = np.zeros((len(pairs), 0), dtype=int), list[str]()
    if judges:
        with waiting("Choosing the pairs to judge"):
            u, prompts = (pairs[name].to_numpy() for name in (BASIS[alone], "prompt"))
            rate = estimate_noise_rate(u, prompts, options.noise_rate, resamples=0)  # no interval is needed
        places = pairs_to_judge(rate, u, options.judged_pairs)
        votes, notes = ask_judges(pairs, places, scored.rows, options, answers)
        asked[places] = True
        for j in range(len(judges)):
            pairs[f"{VOTE}{j + 1}"] = pd.Series(votes[:, j], pairs.index, dtype="Int64").where(asked)
    return Evidence([judge.name for judge in judges], votes, asked, truth), notes


def _changes(table: pd.DataFrame, options: AuditOptions) -> tuple[set[str], set[str]]:
    """Ids of pairs to drop, and to swap: suspected label errors, unless decided by hand."""
    suspected = set(table["id"][table["suggested"] == "swap"])
    action = options.action or ("drop" if options.decided is None else None)
    drop = suspected if action == "drop" else set()
    swap = suspected if action == "swap" else set()
    if options.decided is None:
        return drop, swap
    keep, wrong, out = map(options.decided.named, ("keep", "swap", "drop"))
    return drop - keep - wrong | out, swap - keep - out | wrong


def _texts(scored: ScoredPairs, table: pd.DataFrame) -> dict[str, Texts]:
    found = readable_texts(scored.rows, table["id"].tolist())
    return {
        name: Texts(prompt, *(sides if observed == "chosen" else sides[::-1]))
        for name, observed, (prompt, *sides) in zip(table["id"], table["observed"], found, strict=True)
    }


def _write(folder: Path, tables: dict[str, pd.DataFrame], page: str) -> dict[str, Path]:
    files = {name: folder / name for name in ("pairs.parquet", *(f"{name}.csv" for name in tables))}
    for path in files.values():
        write_frame(path, tables[path.stem])
    write_text(folder / "report.html", page)
    return files | {"report.html": folder / "report.html"}
