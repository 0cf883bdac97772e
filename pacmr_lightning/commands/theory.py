"""How close finished runs come to what the paper's theory says, where the truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..analysis.probe import Split
from ..analysis.theory_measures import (
    agreement,
    calibration_error,
    judged_pairs,
    other_features,
    reliability,
    slope,
    weighs,
    with_intervals,
)
from ..command_line.parser import run_tool
from ..errors import UserError
from ..files import replacing, save_figure
from ..runs.finished_run import Run, find_run, load

RATIOS, CALIBRATION, RELIABILITY, PAIRS = "weight-ratios", "calibration", "reliability", "pairs.parquet"
"""Files of the output folder, the first two as .csv, .png and .pdf."""


def theory_check(
    runs: Sequence[str],
    *,
    output: str,
    split: Split = "validation",
    checkpoint: str = "last",
    micro_batch_size: int | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compares finished runs with Theorem 1 and with the true preference probabilities.

    Theorem 1 is about functions of a pair z: log g+/g- = logit(eta) - logit(q). No label that was drawn
    stands in it, only q, the probability that a noisy label says what the order says in which the pair is
    written; so pairs with labels of any kind can be asked. A pair that was trained on has pushed u towards
    the label it happened to have, which the theorem's optimum, a mean over labels, does not know. Validation
    pairs are therefore the test of what was learned, and q is that of the run's noise. Training pairs, with
    the labels that the run saw, show what learning by heart adds.

    Writes ``weight-ratios`` and ``calibration`` (.csv, .png, .pdf), ``reliability.csv`` and
    ``pairs.parquet``. What was computed stays in ``answers.sqlite``, so that a second call goes on where the
    first was killed.

    Args:
        runs: folders of preference runs on pairs with a known eta.
        output: folder to write to.
        split: validation pairs, or train pairs with labels as trained.
        checkpoint: which of the folder ``checkpoints``, by its name without .ckpt.
        micro_batch_size: pairs in one forward pass; default: as in training, at most 32 of a whole batch.

    Returns:
        Two tables with a row a run: ``label``, ``run``, ``method``, ``noise_rate``, ``step``, ``split``,
        ``pairs``, and then of the runs with weights what ``agreement`` returns, and ``slope_at_u`` (the same
        slope where Theorem 1's optimum is taken at s = u: how steep the weights are, whatever the policy
        believes; NaN for weights that do not look at u); of all runs ``ece_eta`` (of sigma(u) against eta)
        and ``ece_noisy`` (against the labels as trained, or, on validation pairs, their probability q). All
        have 95% intervals, ``..._low`` and ``..._high``, from a bootstrap over prompts.

    Raises:
        UserError: a run's files are missing or do not fit, its pairs have no eta, or its noise has several
            rates.
    """
    if micro_batch_size is not None and micro_batch_size < 1:
        raise UserError(f"micro_batch_size is {micro_batch_size}, but it must be at least 1.")
    folder = Path(output)
    if folder.is_file():
        raise UserError(f"output is {output}, which is a file; name a folder.")
    # All of them before the first is computed.
    found = [find_run(run, checkpoint) for run in dict.fromkeys(runs)]
    labels = _labels(found)
    pairs: dict[str, pd.DataFrame] = {}
    ratios, errors, notes = [], [], []
    for label, run in zip(labels, found, strict=True):
        module, data, step = load(run, as_trained=True)
        if not data.uniform_noise:
            raise UserError(
                f"The labels of {run.folder} were not flipped at one rate ({run.noise}), which Theorem 1's "
                "optimum is computed from; name runs with a noise_rate."
            )
        data.setup("fit" if split == "train" else "validate")
        known = data.train_pairs if split == "train" else data.validation_pairs
        weighting, rate = module.weighting, data.noise_rate
        frame = judged_pairs(module, known, rate, folder / "answers.sqlite", micro_batch_size, run.folder)
        frame["noisy"] = 1.0 if split == "train" else frame["q"]
        pairs[label] = frame
        names = {"label": label, "run": run.folder, "method": module.method, "noise_rate": rate}
        names |= {"step": step, "split": split, "pairs": len(frame)}
        errors.append(names | _calibration(frame))
        if others := other_features(weighting):
            notes.append(
                f"{label}: left out of the weights, which depend on {', '.join(others)}; Theorem 1 is about "
                "u alone."
            )
        elif not weighs(weighting):
            notes.append(f"{label}: left out of the weights, {type(weighting).__name__} has none to compare.")
        elif rate == 0:
            notes.append(f"{label}: left out of the weights, without noise every optimal log-ratio is 0.")
        else:
            ratios.append(names | _agreement(frame))
    tables = pd.DataFrame(ratios), pd.DataFrame(errors)
    _write(folder, pairs, *tables)
    _show(folder, *tables, notes)
    return tables


def _labels(runs: Sequence[Run]) -> list[str]:
    """Names of the runs in tables and figures: method and noise, or their folders where two have the same."""
    options = [(run.model["init_args"], run.data["init_args"]) for run in runs]
    labels = [f"{m.get('method', 'dpo')}, {d.get('noise_rate', 0):.0%} noise" for m, d in options]
    folders = [Path(run.folder).resolve().name for run in runs]
    choices = (labels, folders, [run.folder for run in runs])
    return next(names for names in choices if len(set(names)) == len(names))


def _agreement(frame: pd.DataFrame) -> dict[str, float]:
    def measure(optimum: np.ndarray, at_u: np.ndarray, log_ratio: np.ndarray) -> dict[str, float]:
        return agreement(optimum, log_ratio) | {"slope_at_u": slope(at_u, log_ratio)}

    return with_intervals(measure, *_columns(frame, "prompt", "optimum", "optimum_at_u", "log_ratio"))


def _calibration(frame: pd.DataFrame) -> dict[str, float]:
    def measure(u: np.ndarray, eta: np.ndarray, noisy: np.ndarray) -> dict[str, float]:
        return calibration_error(u, eta=eta, noisy=noisy)

    return with_intervals(measure, *_columns(frame, "prompt", "u", "eta", "noisy"))


def _columns(frame: pd.DataFrame, *names: str) -> list[np.ndarray]:
    return [frame[name].to_numpy() for name in names]


def _write(folder: Path, pairs: dict[str, pd.DataFrame], ratios: pd.DataFrame, errors: pd.DataFrame) -> None:
    from ..analysis.theory_figure import draw_ratios, draw_reliability

    everything = pd.concat([frame.assign(label=label) for label, frame in pairs.items()], ignore_index=True)
    with replacing(folder / PAIRS) as temporary:
        everything.to_parquet(temporary, index=False)
    bins = {}
    for label, frame in pairs.items():
        u, eta, noisy = _columns(frame, "u", "eta", "noisy")
        bins[label] = reliability(u, eta=eta, noisy=noisy)
    tables = {CALIBRATION: errors}
    tables[RELIABILITY] = pd.concat([table.assign(label=label) for label, table in bins.items()])
    figures = {CALIBRATION: draw_reliability(list(bins.values()), list(bins), errors)}
    if len(ratios):
        tables[RATIOS] = ratios
        figures[RATIOS] = draw_ratios([pairs[label] for label in ratios["label"]], ratios)
    for name, table in tables.items():
        with replacing(folder / f"{name}.csv") as temporary:
            table.to_csv(temporary, index=False)
    for name, figure in figures.items():
        save_figure(figure, folder / name)


def _show(folder: Path, ratios: pd.DataFrame, errors: pd.DataFrame, notes: Sequence[str]) -> None:
    console = Console()
    shown = (
        (ratios, {"r": "pearson", "rho": "spearman", "slope": "slope", "slope at s = u": "slope_at_u"}),
        (errors, {"ECE, eta": "ece_eta", "ECE, noisy label": "ece_noisy"}),
    )
    for rows, columns in shown:
        if not len(rows):
            continue
        table = Table("", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for heading in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for _, row in rows.iterrows():
            table.add_row(row["label"], *(_cell(row[name]) for name in columns.values()))
        console.print(table)
    for note in notes:
        console.print(f"  {note}", highlight=False, markup=False, style="dim")
    console.print("  95% intervals are in the tables.", highlight=False, style="dim")
    console.print(f"Tables, figures and every pair's values: {folder}", highlight=False, markup=False)


def _cell(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}"


def main(arguments: list[str]) -> None:
    """``pacmr theory RUN [RUN ...] --output FOLDER`` and the options of ``theory_check``."""
    run_tool("theory", theory_check, arguments, positional=True)
