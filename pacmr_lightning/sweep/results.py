"""Results of a sweep's finished cells, with means and differences over seeds."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from ..runs.folder import SAMPLES, WEIGHT_GAP_TABLE, read_summary
from .cells import Cell, anchor_cells, short_name
from .evaluation import judged_wins
from .spec import Sweep


@dataclass(frozen=True)
class Measure:
    """A result of a run."""

    heading: str
    digits: int
    of: Callable[[dict[str, Any]], float | None] | None = None
    """Getter from the summary; None for comparisons with the anchor's samples."""


MEASURES = {
    "gold_reward": Measure("Gold reward", 2, lambda s: s["metrics"].get("val/gold_reward")),
    "win_rate": Measure("Win rate (%)", 2),
    "win_score": Measure("Win-score", 4),
    "val_accuracy": Measure("Validation accuracy", 3, itemgetter("val_accuracy")),
    "gold_accuracy": Measure("Accuracy by the gold sign", 3, lambda s: s["metrics"].get("val/gold_accuracy")),
    "weight_gap": Measure("Weight gap", 4, itemgetter("weight_gap")),
    "flip_auroc": Measure("Flip AUROC of g", 3, itemgetter("flip_auroc")),
    "flip_auroc_u": Measure("Flip AUROC of u", 3, itemgetter("flip_auroc_u")),
}
"""Measures to maximize."""
KL = {"sequence_kl": Measure("Sequence KL", 2, lambda s: s["metrics"].get("val/sequence_kl"))}
WEIGHTS = {
    f"weight_mean_{kind}": Measure(f"Mean weight ({kind})", 4, itemgetter(f"weight_mean_{kind}"))
    for kind in ("unflipped", "flipped")
}
PROBE = {
    "probe_mean_unflipped": Measure("Mean weight (unflipped)", 4),
    "probe_mean_flipped": Measure("Mean weight (flipped)", 4),
    "probe_gap": Measure("Weight gap", 4),
}
"""Weights of the same training pairs in all runs, by the final weight function."""
VNET = {
    "vnet_updates": Measure("VNet's updates", 1, lambda s: s.get("vnet_updates")),
    "vnet_skipped": Measure("skipped", 1, lambda s: s.get("vnet_skipped")),
}
"""Measures without a direction, with ``KL``, ``WEIGHTS`` and ``PROBE``."""
NUMBERS = MEASURES | KL | WEIGHTS | PROBE | VNET
JUDGED = {
    "pairs": Measure("Pairs", 0),
    "win_rate": MEASURES["win_rate"],
    "tie_rate": Measure("Ties (%)", 2),
    "win_score": MEASURES["win_score"],
    "flipped": Measure("Flipped with the order (%)", 1),
    "invalid": Measure("Answers without a verdict (%)", 1),
}
"""Measures of the verdicts over all seeds."""
GREEK = {"tau": "τ", "beta": "β", "epsilon": "ε"}
TAKEN = ("row", "method", "noise", "seed", "task", "bound", "value", *NUMBERS)
"""Columns that are no option's; "value" is reserved by pandas' ``melt``."""


def option_columns(sweep: Sweep) -> dict[str, str]:
    """Return the column of each varied option: its last word, or its full name if that is taken."""
    options = dict.fromkeys(option for method in sweep.methods.values() for option in method.vary)
    words = Counter(map(short_name, options))
    return {o: o if words[short_name(o)] > 1 or short_name(o) in TAKEN else short_name(o) for o in options}


def results(sweep: Sweep, done: Sequence[Cell]) -> pd.DataFrame:
    """Return one row per finished cell, by method in the sweep's order.

    Columns: ``row`` (the method's label with varied values), ``method``, ``noise``, ``seed``, ``task``,
    ``bound``, the ``columns`` of varied options, and ``NUMBERS`` (NaN if unknown).
    """
    rows = []
    names = option_columns(sweep)
    rewards = {cell.name: _sampled_rewards(cell) for cell in done}
    anchors = anchor_cells(sweep, done)
    for cell in done:
        summary = read_summary(cell.folder)
        row = {"row": row_label(sweep, cell), "method": cell.method, "noise": cell.noise, "seed": cell.seed}
        row |= {"task": summary["task"], "bound": sweep.methods[cell.method].bound}
        row |= {names[option]: value for option, value in cell.variation.items()}
        row |= {name: measure.of(summary) for name, measure in NUMBERS.items() if measure.of}
        row |= _probe_weights(cell)
        if summary["flip_auroc"] is None:  # all weights are equal
            row |= dict.fromkeys([*WEIGHTS, *PROBE, "weight_gap"])
        anchor = anchors.get(cell.name)
        if sweep.evaluate is None:
            row |= _wins(rewards[cell.name], rewards[anchor.name] if anchor else None)
        else:
            row |= judged_wins(sweep.evaluate, cell, anchor)
        rows.append(row)
    order = {name: i for i, name in enumerate(sweep.methods)}
    frame = pd.DataFrame(rows).sort_values("method", key=lambda names: names.map(order), kind="stable")
    return frame.astype(dict.fromkeys(NUMBERS, float)).reset_index(drop=True)


def row_label(sweep: Sweep, cell: Cell) -> str:
    """Return the method's label with its varied values."""
    method = sweep.methods[cell.method]
    several = [option for option, values in method.vary.items() if len(values) > 1]
    names = [option_columns(sweep)[option] for option in several]
    values = [cell.variation[option] for option in several]
    words = [f"{GREEK.get(name, name)} = {value}" for name, value in zip(names, values, strict=True)]
    return ", ".join([method.label or cell.method, *words])


def _probe_weights(cell: Cell) -> dict[str, float | None]:
    """``PROBE`` from the last row of the callback WeightGap, None without one."""
    path = cell.folder / WEIGHT_GAP_TABLE
    if not path.exists():
        return dict.fromkeys(PROBE)
    last = pd.read_csv(path).iloc[-1]
    return {name: last[name.removeprefix("probe_")] for name in PROBE}


def _sampled_rewards(cell: Cell) -> np.ndarray | None:
    """(S,) gold rewards of the run's sampled responses, prompt by prompt."""
    path = cell.folder / SAMPLES
    if not path.exists():
        return None
    with path.open(encoding="utf-8") as file:
        return np.array([json.loads(line)["gold_reward"] for line in file])


def _wins(own: np.ndarray | None, anchor: np.ndarray | None) -> dict[str, float | None]:
    """Win rate, and win-score = 1 + (wins - losses) / comparisons (Qu et al., appendix H), by gold reward."""
    if own is None or anchor is None or len(own) != len(anchor):
        return {"win_rate": None, "win_score": None}
    score = 1 + float(np.mean(np.sign(own - anchor)))
    return {"win_rate": 100 * float(np.mean(own > anchor)), "win_score": score}


def seed_means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return mean and standard error (NaN for one seed) over seeds of ``results`` rows."""
    long = frame.melt(["row", "noise"], list(NUMBERS), "measure", "value").dropna(subset="value")
    groups = long.groupby(["row", "noise", "measure"], sort=False)["value"]
    return groups.agg(mean="mean", stderr="sem", seeds="count").reset_index()


def differences(frame: pd.DataFrame) -> pd.DataFrame:
    """Return mean paired differences over seeds, ``first`` minus ``second``, of all ordered pairs of rows.

    Cells with the same seed and noise rate share wrong labels and order, so these effects cancel.
    """
    found = []
    long = frame.melt(["row", "noise", "seed"], list(MEASURES), "measure", "value").dropna(subset="value")
    for (noise, measure), values in long.groupby(["noise", "measure"], sort=False):
        by_seed = values.pivot(index="seed", columns="row", values="value")
        for first, second in permutations(by_seed.columns, 2):
            gaps = (by_seed[first] - by_seed[second]).dropna()
            if len(gaps):
                found.append((measure, noise, first, second, gaps.mean(), gaps.sem(), len(gaps)))
    option_columns = ["measure", "noise", "first", "second", "mean", "stderr", "seeds"]
    return pd.DataFrame(found, columns=option_columns)
