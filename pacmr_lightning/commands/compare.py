"""Command ``pacmr compare``: finished runs in a table."""

import os
from typing import Any

from ..command_line.output import plain_table, print_result
from ..runs.folder import read_summary

COLUMNS = {
    "injected noise": ("{noise_percent:.3g}%", "labels flipped on purpose; wrong labels in data come on top"),
    "accuracy": (
        "{val_accuracy:.3f}",
        "validation pairs whose label the policy prefers (u > 0), labels as given",
    ),
    "gold reward": (
        "{val/gold_reward:.2f} ± {val/gold_reward_stderr:.2f}",
        "of sampled responses, mean ± standard error",
    ),
    "KL": (
        "{val/sequence_kl:.2f}",
        "to the reference, on sampled responses, in nats; compare rewards at similar KL",
    ),
    "gap": ("{weight_gap:.2f}", "mean weight of unflipped minus flipped pairs, over the last training pairs"),
    "AUROC g": ("{flip_auroc:.2f}", "of low weights, for finding flipped labels"),
    "AUROC u": ("{flip_auroc_u:.2f}", "of low implicit reward margins u, for finding flipped labels"),
    "wall time": ("{wall_seconds:.0f} s", "whole fit, validation and sampling included"),
}
"""Format, over the keys of the summary and its ``metrics``, and meaning of each column, by heading."""


def compare(runs: list[str]) -> None:
    """Prints a table of finished runs, without columns that no run has.

    Args:
        runs: folders of runs.

    Raises:
        UserError: a run has no summary.
    """
    summaries = [read_summary(run) for run in runs]
    cells = {heading: [_cell(form, one) for one in summaries] for heading, (form, _) in COLUMNS.items()}
    columns = {heading: column for heading, column in cells.items() if any(column)}
    table = plain_table("method", *columns)
    shared = os.path.commonpath([os.path.dirname(os.path.abspath(run)) for run in runs])
    methods = [one["method"] for one in summaries]
    for run, method, *row in zip(runs, methods, *columns.values(), strict=True):
        name = method if methods.count(method) == 1 else f"{method}, {os.path.relpath(run, shared)}"
        table.add_row(name, *(cell or "-" for cell in row))
    print_result(table)
    for heading in columns:
        print(f"  {heading}: {COLUMNS[heading][1]}")
    for run, numbers in zip(runs, summaries, strict=True):
        if numbers.get("val_step") not in (None, steps := numbers.get("steps")):
            print(f"  {run}: accuracy after update {numbers['val_step']:,} of {steps:,}")
        if (step := numbers["metrics"].get("val/guard/restored_step")) is not None:
            print(f"  {run}: KLGuard ended it after update {steps:,}; policy of update {step:,.0f}")


def _cell(form: str, summary: dict[str, Any]) -> str:
    known = {key: value for key, value in {**summary["metrics"], **summary}.items() if value is not None}
    if rate := known.get("noise_rate"):  # 0 is nothing injected; the data's own noise rate is unknown
        known["noise_percent"] = 100 * rate
    try:
        return form.format_map(known)
    except KeyError:
        return ""
