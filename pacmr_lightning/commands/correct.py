"""Command ``pacmr correct``: second-pass training on labels corrected by PerpCorrect."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from ..audit import AuditOptions
from ..audit.cleaned_file import write_cleaned_file
from ..audit.perp_correct import Rounds
from ..command_line.output import print_result
from ..command_line.plain_table import plain_table
from ..datamodules.cleaned import exchanged, write_rows
from ..datamodules.sources import Source
from ..errors import UserError
from ..evaluation.answer_store import content_key
from ..files import local_path, write_frame
from ..runs.finished_run import FinishedRun, PreferenceData, find_run, load_run
from ..runs.folder import SUMMARY
from .second_pass import (
    AUDIT,
    audit_first,
    check_beta,
    compare_passes,
    fit,
    folder_beside,
    kept_file,
    train_again,
)

RECORD = "correct.json"
ROUNDS = "rounds"
"""Folder of the rounds' runs; a complete one has ``scores.parquet``."""
PAIRS = "pairs.parquet"
TABLE = "rounds.csv"


def correct(
    run: str,
    clean: Source | None = None,
    output: str | None = None,
    beta: float | None = None,
    rounds: Rounds = Rounds(),  # noqa: B008  # it is frozen
    cleaned: str | None = None,
) -> None:
    """Trains a second pass from the reference on labels corrected by PerpCorrect.

    Each round trains DPO from the reference on the clean pairs and on the most confident training pairs of
    the previous round, and scores all pairs by perplexity. The round with the best separation of right and
    wrong labels gives the corrected labels. The second pass is a run of its own beside the first, with
    the rounds in its folder ``rounds`` and an audit of the first run in ``audit``; it ends with a comparison
    of the two runs. The same command resumes after an interruption.

    Args:
        run: folder of a finished preference run.
        clean: source of clean pairs, such as a file of ``pacmr clean-meta``; default: the run's clean_meta.
            PerpCorrect uses 50.
        output: folder of the second pass; default: the run's name with ``-corrected``.
        beta: DPO's temperature in the second pass; default: the first run's.
        rounds: settings of the rounds.
        cleaned: file for the training pairs with wrong labels swapped, in the format of the run's data.

    Raises:
        UserError: there are no clean pairs, or fewer than a batch; options or files do not fit; the folder
            holds something else; or no round separates right from wrong labels.
    """
    check_beta(beta)
    first = find_run(run, "last")
    data = _data(first, clean, rounds)
    if cleaned is not None:
        data.source.check_output(cleaned)
    folder = local_path(output) if output else folder_beside(run, "corrected")
    tokens = (data.clean_pairs.rows[f"{name}_ids"][:] for name in ("prompt", "chosen", "rejected"))
    named = f"{data.clean_meta.name} ({content_key(*tokens)[:8]})"
    asked = {"run": str(run), "clean": named, "beta": beta}
    asked["checkpoint"] = kept_file("last", first.checkpoint)
    asked |= {f"rounds.{name}": value for name, value in asdict(rounds).items()}
    options = AuditOptions("policy", str(folder / AUDIT))
    audit_first(run, folder, asked, RECORD, options)
    write = partial(_write_pairs, data)
    pairs, table = rounds.run(first, data, folder / ROUNDS, write, fit)
    write_frame(folder / PAIRS, pairs)
    write_frame(folder / TABLE, table)
    _show(table, len(pairs), folder)
    if cleaned is not None:
        wrong = set(pairs["id"][pairs["suggested"] == "swap"])
        print(write_cleaned_file(data.noise_flips, data.source, cleaned, set(), wrong).sentence)
    if not (folder / SUMMARY).exists():
        use = {
            "model.weighting": "AuditedWeights",
            "model.weighting.audit": str(folder / PAIRS),
            "model.weighting.soft_labels": "true",
            "data.clean_meta": "null",
            "data.hold_out_clean_meta": "true",
        }
        train_again(first, folder, "corrected", beta, use, (AUDIT, RECORD, ROUNDS, PAIRS, TABLE))
    compare_passes(run, folder)


def _data(first: FinishedRun, clean: Source | None, rounds: Rounds) -> PreferenceData:
    """Return the run's data with all training pairs as trained, and the clean pairs."""
    if clean is None and not first.data["init_args"].get("clean_meta"):
        raise UserError(
            f"The run {first.folder} has no clean pairs, which PerpCorrect needs; give some, such as --clean "
            "Files --clean.train clean.jsonl of pacmr clean-meta, or use pacmr refine, which needs none."
        )
    _, data, _ = load_run(first, as_trained=True)
    data.clean_meta = data.clean_meta if clean is None else clean
    data.hold_out_clean_meta = False
    data.setup("fit")
    if len(data.clean_pairs) < rounds.batch_size:
        raise UserError(
            f"{data.clean_meta.name} has {len(data.clean_pairs)} clean pairs, fewer than rounds.batch_size "
            f"{rounds.batch_size}; give more clean pairs, or lower it."
        )
    if not round(rounds.share * (number := len(data.train_pairs))):
        raise UserError(
            f"rounds.share is {rounds.share}, less than one of {number} training pairs, so all rounds would "
            f"be equal; make it {1 / number:.2g} or more."
        )
    return data


def _write_pairs(data: PreferenceData, path: Path, kept: list[int], swap: list[int]) -> None:
    """Write clean pairs, training pairs as trained, and others with the label swapped."""
    found = data.source.load("train")
    places = {name: i for i, name in enumerate(found["id"][:])}
    rows = list(data.clean_meta.load_all())
    for indices, opposite in ((kept, False), (swap, True)):
        for i in indices:
            row = found[places[data.train_pairs.rows[i]["id"]]]
            rows.append(exchanged(row) if data.train_pairs.swapped[i] != opposite else row)
    # Ids must be unique, and a pair can be both clean and selected.
    write_rows(({**row, "id": None} for row in rows), path)


def _show(table: pd.DataFrame, pairs: int, folder: Path) -> None:
    """Print the rounds, and their noise rate beside the audit's."""
    shown = plain_table()
    for heading in ("round", "kept", "swapped", "wrong", "separation", "threshold", "changed"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("")
    for row in table.to_dict("records"):
        shown.add_row(
            *(str(row[name]) for name in ("round", "kept", "swapped")),
            *(f"{1 - row['alpha']:.1%}", f"{row['separation']:.3f}", f"{row['threshold']:+.3f}"),
            f"{row['changed'] / pairs:.1%}",
            "used" if row["best"] else row["problem"],
        )
    print_result(shown)
    best = table[table["best"]].iloc[0]
    if best["separation"] <= best["alpha"]:
        print(
            f"By the fit of round {best['round']}, {best['alpha']:.1%} of the labels are right as they are "
            f"and {best['separation']:.1%} after correction. PerpCorrect continues, but such a fit can be "
            "wrong; compare the two runs."
        )
    audited = pd.read_parquet(folder / AUDIT / PAIRS)["p_wrong"].mean()
    told = "not identified" if np.isnan(audited) else f"{audited:.1%}"
    print_result(
        f"Estimated noise rate: {1 - best['alpha']:.1%} by round {best['round']} (label_noise of cDPO and "
        f"rDPO); by the audit of the first run: {told}."
    )
