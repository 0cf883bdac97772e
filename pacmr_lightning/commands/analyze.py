"""Command ``pacmr analyze``: prompt-augmentation consistency of policies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from ..analysis.consistency import check_taus, consistency_by_threshold, judged_pairs
from ..command_line.output import plain_table, print_result
from ..errors import UserError, check_at_least
from ..files import check_writable, local_path, write_frame, write_text
from ..runs.finished_run import FinishedRun, find_run, load_run
from ..runs.folder import ANALYSIS

TAUS = (0.55, 0.6, 0.7)
"""Thresholds of Qu et al."""

SHARES = {
    "Coverage (%)": "coverage",
    "Clean accuracy (%)": "clean_accuracy",
    "Direction agreement (%)": "direction_agreement",
}
"""Columns of the table of Qu et al., after task, number of pairs, binary l1 and tau."""


def analyze(
    runs: Sequence[str],
    split: Literal["train", "validation"] = "train",
    taus: Sequence[float] = TAUS,
    output: str | None = None,
    checkpoint: str = "last",
    pairs: int | None = None,
    seed: int = 42,
    augmentations: str | None = None,
) -> pd.DataFrame:
    """Measures how policies of finished runs agree with themselves under augmented prompts (Qu et al.).

    Each run's policy is the probe and its base the reference; labels are the original ones, without injected
    noise. Writes ``consistency-SPLIT.csv`` (with standard errors) and ``.md``, and ``pairs-SPLIT.parquet``
    with the values of every pair. Values are cached, so a second call resumes.

    Args:
        runs: folders of preference runs.
        split: train or validation pairs; the probe was trained on the labels of the former.
        taus: confidence thresholds of the table, each at least 0.5 and below 1.
        output: folder of the results; default: ``analysis`` inside the first run's folder.
        checkpoint: name, without .ckpt, of a file in each run's folder ``checkpoints``.
        pairs: size of a random sample of the pairs; default: all pairs.
        seed: seed of that sample.
        augmentations: file of ``pacmr augment`` with augmented training prompts; default: that of each run's
            configuration, else the rows' own, else rule-based rewording.

    Returns:
        The rows of ``consistency_by_threshold`` with ``task`` (pairs whose augmented prompt was made by rules
        apart), folder ``run``, ``step`` (policy updates) and ``split``.

    Raises:
        UserError: an option is out of range, or a run's files or pairs do not fit.
    """
    check_taus(taus)
    if not runs:
        raise UserError("runs is empty, but at least one folder of a preference run is needed.")
    check_at_least(0, seed=seed)
    if augmentations is not None and split != "train":
        raise UserError(
            f"augmentations is {augmentations}, but it is for training pairs only; give the validation rows "
            "an augmented_prompt, or leave it out."
        )
    # Before the computation, which may take hours.
    probes = [find_run(run, checkpoint) for run in dict.fromkeys(runs)]
    folder = local_path(output) if output else Path(probes[0].folder) / ANALYSIS
    check_writable("output", str(folder), folder)
    judged, parts, notes = [], [], []
    tasks = [run.data["init_args"].get("task", "preferences") for run in probes]
    labels = tasks if len(set(tasks)) == len(tasks) else [run.folder for run in probes]
    for label, run in zip(labels, probes, strict=True):
        module, data, step = load_run(run, augmentations)
        frame = judged_pairs(module, data, split, pairs, seed)
        frame["task"] = np.where(frame["given_view"], label, f"{label}, by rules")
        for given in sorted(frame["given_view"].unique(), reverse=True):
            group = frame[frame["given_view"].eq(given)]
            rows = consistency_by_threshold(group, taus)
            names = {"task": group["task"].iloc[0], "run": run.folder, "step": step, "split": split}
            parts.append(pd.DataFrame(names, index=rows.index).join(rows))
        notes.append(_note(label, run, step, split, frame))
        judged.append(frame)
    table = pd.concat(parts, ignore_index=True)
    notes.append("Standard errors, in the CSV, are clustered by prompt.")
    write_frame(folder / f"pairs-{split}.parquet", pd.concat(judged, ignore_index=True))
    write_frame(folder / f"consistency-{split}.csv", table)
    headings = ["Task", "N", "Binary l1", "tau", *SHARES]
    cells, shown = [headings, ["---"] * len(headings)], plain_table(*headings)
    for _, row in table.iterrows():
        first = [row["task"], f"{row['pairs']:,}", f"{row['l1']:.4f}", f"{row['tau']:g}"]
        cells.append([*first, *(_percent(row[name]) for name in SHARES.values())])
        shown.add_row(*cells[-1])
    lines = [f"| {' | '.join(row)} |" for row in cells]
    text = "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"
    write_text(folder / f"consistency-{split}.md", text)
    print_result(shown)
    print_result("\n".join(f"  {note}" for note in notes), style="dim")
    print(f"Table and values per pair: {folder}")
    return table


def _note(label: str, run: FinishedRun, step: int, split: str, pairs: pd.DataFrame) -> str:
    everything = consistency_by_threshold(pairs, [0.5]).iloc[0]
    accuracy = f"{_percent(everything['clean_accuracy'])} ± {_percent(everything['clean_accuracy_stderr'])}%"
    given = int(pairs["given_view"].sum())
    parts = [
        f"after {step:,} updates the probe's accuracy on all {pairs['clean'].count():,} {split} pairs with a "
        f"better response is {accuracy}" + (", on which it was trained" if split == "train" else ""),
        f"augmented prompts: {given:,} from the data, {len(pairs) - given:,} by rules, which change the "
        "surface only",
    ]
    if pairs.attrs["no_augmented_prompt"]:
        parts.append(f"without an augmented prompt, excluded: {pairs.attrs['no_augmented_prompt']:,} pairs")
    if run.noise:
        parts.append(f"the probe was trained with injected noise ({run.noise}), that of Qu et al. without")
    return f"{label}: {'; '.join(parts)}."


def _percent(share: float) -> str:
    return "-" if np.isnan(share) else f"{100 * share:.2f}"
