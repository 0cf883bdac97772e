"""Results of a sweep's finished cells: measures, judgements, and means and differences over seeds."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..evaluation.answer_store import AnswerStore, content_key
from ..evaluation.judging import cost_before
from ..evaluation.response_files import read_responses
from ..evaluation.win_rate import (
    OUTCOMES,
    VERDICTS,
    judge_pairs,
    outcome_rates,
    read_judged,
    response_pairs,
    reward_wins,
)
from ..runs.folder import SAMPLES, read_summary
from .cells import Cell, anchor_cells, short_name
from .spec import Evaluation, Sweep
from .state import has_responses


@dataclass(frozen=True)
class Measure:
    """A result of a run."""

    heading: str
    digits: int
    of: Callable[[dict[str, Any]], float | None] | None = None
    """Getter from the summary; None for comparisons with the anchor's samples."""


def _metric(name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda summary: summary["metrics"].get(name)


MEASURES = {
    "gold_reward": Measure("Gold reward", 2, _metric("val/gold_reward")),
    "win_rate": Measure("Win rate (%)", 2),
    "win_score": Measure("Win-score", 4),
    "val_accuracy": Measure("Validation accuracy", 3, itemgetter("val_accuracy")),
    "gold_accuracy": Measure("Accuracy by the gold sign", 3, _metric("val/gold_accuracy")),
    "weight_gap": Measure("Weight gap", 4, itemgetter("weight_gap")),
    "flip_auroc": Measure("Flip AUROC of g", 3, itemgetter("flip_auroc")),
    "flip_auroc_u": Measure("Flip AUROC of u", 3, itemgetter("flip_auroc_u")),
}
"""Measures to maximize."""
KL = {"sequence_kl": Measure("Sequence KL", 2, _metric("val/sequence_kl"))}
WEIGHTS = {
    f"weight_mean_{kind}": Measure(f"Mean weight ({kind})", 4, itemgetter(f"weight_mean_{kind}"))
    for kind in ("unflipped", "flipped")
}
PROBE = {
    f"probe_{name}": Measure(heading, 4, _metric(f"pair_weights/probe_{name}"))
    for name, heading in (
        ("mean_unflipped", "Mean weight (unflipped)"),
        ("mean_flipped", "Mean weight (flipped)"),
        ("gap", "Weight gap"),
    )
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
VERDICT_FOLDER = "judge"
"""Folder of a cell's verdicts, inside the cell's; the default of ``pacmr judge``."""
ANSWERS = "judge-answers.sqlite"
"""The judge's answers, for all cells of a sweep's folder."""
GREEK = {"tau": "τ", "beta": "β", "epsilon": "ε"}
TAKEN = ("row", "method", "noise", "seed", "task", "bound", "value", "restored_step", *NUMBERS)
"""Columns that are no option's; "value" is reserved by pandas' ``melt``."""


def option_columns(sweep: Sweep) -> dict[str, str]:
    """Return the column of each varied option: its last word, or its full name if that is taken."""
    options = dict.fromkeys(option for method in sweep.methods.values() for option in method.vary)
    words = Counter(map(short_name, options))
    return {o: o if words[short_name(o)] > 1 or short_name(o) in TAKEN else short_name(o) for o in options}


def results(sweep: Sweep, done: Sequence[Cell]) -> pd.DataFrame:
    """Return one row per finished cell, by method in the sweep's order.

    Columns: ``row`` (the method's label with varied values), ``method``, ``noise``, ``seed``, ``task``,
    ``bound``, the ``columns`` of varied options, ``restored_step`` of KLGuard, and ``NUMBERS`` (NaN if
    unknown).
    """
    rows = []
    names = option_columns(sweep)
    samples = {cell.name: cell.folder / SAMPLES for cell in done}
    rewards = {  # (S,) gold rewards, prompt by prompt
        name: np.array([row["gold_reward"] for row in read_responses(path)]) if path.exists() else None
        for name, path in samples.items()
    }
    anchors = anchor_cells(sweep, done)
    for cell in done:
        summary = read_summary(cell.folder)
        row = {"row": row_label(sweep, cell), "method": cell.method, "noise": cell.noise, "seed": cell.seed}
        row |= {"task": summary["task"], "bound": sweep.methods[cell.method].bound}
        row["restored_step"] = summary["metrics"].get("val/guard/restored_step")
        row |= {names[option]: value for option, value in cell.variation.items()}
        row |= {name: measure.of(summary) for name, measure in NUMBERS.items() if measure.of}
        if summary["flip_auroc"] is None and not summary.get("vnet_updates"):  # all weights are equal
            row |= dict.fromkeys([*WEIGHTS, *PROBE, "weight_gap"])
        anchor = anchors.get(cell.name)
        row |= {"win_rate": None, "win_score": None}
        if anchor and sweep.evaluate is None:
            row |= reward_wins(rewards[cell.name], rewards[anchor.name])
        elif anchor and sweep.evaluate and (verdicts := judged(sweep.evaluate, cell, anchor)):
            row["win_rate"] = 100 * verdicts["win_rate"]["value"]
            row["win_score"] = verdicts["win_score"]["value"]
        rows.append(row)
    order = {name: i for i, name in enumerate(sweep.methods)}
    given = pd.DataFrame(rows, dtype=object)  # options as given: 1, where other methods have none, is no 1.0
    frame = given.infer_objects().assign(**given.filter(list(names.values())))
    frame = frame.sort_values("method", key=lambda names: names.map(order), kind="stable")
    return frame.astype(dict.fromkeys(NUMBERS, float)).reset_index(drop=True)


def varied_columns(sweep: Sweep, method: str) -> dict[str, str]:
    """Return the column of each option of which a method has several values."""
    names = option_columns(sweep)
    return {option: names[option] for option, values in sweep.methods[method].vary.items() if len(values) > 1}


def row_label(sweep: Sweep, cell: Cell) -> str:
    """Return the method's label with its varied values."""
    varied = varied_columns(sweep, cell.method).items()
    words = [f"{GREEK.get(name, name)} = {cell.variation[option]}" for option, name in varied]
    return ", ".join([sweep.methods[cell.method].label or cell.method, *words])


def seed_means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return mean and standard error (NaN for one seed) over seeds of ``results`` rows."""
    long = frame.melt(["row", "noise"], list(NUMBERS), "measure", "value").dropna(subset="value")
    groups = long.groupby(["row", "noise", "measure"], sort=False)["value"]
    return groups.agg(mean="mean", stderr="sem", seeds="count").reset_index()


def differences(frame: pd.DataFrame) -> pd.DataFrame:
    """Return mean paired differences over seeds, ``first`` minus ``second``, of all ordered pairs of rows.

    Cells with the same seed and noise rate share wrong labels and order, so these effects cancel.
    """
    rows = []
    long = frame.melt(["row", "noise", "seed"], list(MEASURES), "measure", "value").dropna(subset="value")
    for (noise, measure), values in long.groupby(["noise", "measure"], sort=False):
        by_seed = values.pivot(index="seed", columns="row", values="value")
        for first, second in permutations(by_seed.columns, 2):
            gaps = (by_seed[first] - by_seed[second]).dropna()
            if len(gaps):
                rows.append((measure, noise, first, second, gaps.mean(), gaps.sem(), len(gaps)))
    return pd.DataFrame(rows, columns=["measure", "noise", "first", "second", "mean", "stderr", "seeds"])


def comparisons(sweep: Sweep, found: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Return each cell with the anchor's cell that it is compared with."""
    anchors = anchor_cells(sweep, found)
    return [(cell, anchors[cell.name]) for cell in found if cell.name in anchors]


def judged(evaluate: Evaluation, cell: Cell, anchor: Cell) -> dict[str, Any] | None:
    """Return the summary of a comparison; None if the present responses have not been judged."""
    if not (has_responses(cell) and has_responses(anchor)):
        return None
    files = (cell.responses, anchor.responses)
    return read_judged(cell.folder / VERDICT_FOLDER, files, evaluate.judge, evaluate.seed)


def judge_cells(sweep: Sweep, found: Sequence[Cell]) -> None:
    """Judge the responses of cells that have no verdicts yet; print the cost first.

    Raises:
        UserError: the judge fails, or responses of two cells are to other prompts.
    """
    evaluate = sweep.evaluate
    assert evaluate is not None
    # Those without verdicts, or with questions that have no answer and are asked again.
    left = [
        (cell, anchor)
        for cell, anchor in comparisons(sweep, found)
        if all(map(has_responses, (cell, anchor)))
        and ((summary := judged(evaluate, cell, anchor)) is None or summary["unanswered"])
    ]
    if not left:
        return
    pairs = {cell.name: response_pairs(cell.responses, anchor.responses) for cell, anchor in left}
    asked = [pair for each in pairs.values() for pair in each if not pair.identical]
    judge = evaluate.judge
    with AnswerStore(Path(sweep.output) / ANSWERS) as answers:
        prices = (evaluate.prompt_price, evaluate.completion_price)
        questions = judge.questions(asked, answers)
        cost = cost_before(judge, questions, prices) if questions else "no calls"
        print(f"Judging {len(left)} comparisons with {judge.name}: {cost}.", file=sys.stderr)
        for cell, anchor in left:
            files = (str(cell.responses), str(anchor.responses))
            folder = cell.folder / VERDICT_FOLDER
            result, *_ = judge_pairs(pairs[cell.name], files, judge, answers, folder, evaluate.seed, prices)
            score, missing = result.win_score, result.unanswered
            line = f"{cell.name}: win-score {score.value:.3f} ({score.low:.3f} to {score.high:.3f})"
            if missing:
                line += f"; no answer to {missing:.1%} of the questions, which the next run asks again"
            print(line, file=sys.stderr)


def pooled(sweep: Sweep, done: Sequence[Cell], labels: Mapping[str, str]) -> pd.DataFrame:
    """Return win rates over all seeds together, whose intervals resample prompts with all their pairs.

    One row per row of the tables (``labels``, by a cell's name), noise rate and ``measure``: ``pairs``, in %
    ``win_rate``, ``tie_rate``, ``flipped`` (with the order, of the pairs with a verdict in both), answers
    without a verdict (``invalid``), and ``win_score``. Columns: ``value``, and ``low`` and ``high`` of the
    rates and the score.
    """
    assert sweep.evaluate is not None
    groups: dict[tuple[str, float], list[pd.DataFrame]] = {}
    for cell, anchor in comparisons(sweep, done):
        if judged(sweep.evaluate, cell, anchor) is not None:
            verdicts = pd.DataFrame(read_responses(cell.folder / VERDICT_FOLDER / VERDICTS))
            groups.setdefault((labels[cell.name], cell.noise), []).append(verdicts)
    rows = []
    for (label, noise), members in groups.items():
        frame = pd.concat(members)
        _, prompts = np.unique(frame["prompt"].map(content_key), return_inverse=True)
        outcomes = frame["verdict"].map(OUTCOMES.index).to_numpy()
        win, tie, _, score, _ = outcome_rates(outcomes, prompts, sweep.evaluate.seed)
        row: dict[str, Any] = {"row": label, "noise": noise}
        orders = [both for both in frame["orders"] if both]  # identical responses have none
        broken = [one["problem"] is not None for both in orders for one in both]
        whole = [both for both in orders if all(one["problem"] is None for one in both)]
        flips = [{one["verdict"] for one in both} == {"win", "loss"} for both in whole]
        shares = {"flipped": flips, "invalid": broken}
        means = {name: 100 * sum(found) / (len(found) or np.nan) for name, found in shares.items()}
        means["pairs"] = len(frame)
        rows += [row | {"measure": measure, "value": value} for measure, value in means.items()]
        for measure, factor, one in (("win_rate", 100, win), ("tie_rate", 100, tie), ("win_score", 1, score)):
            values = {key: factor * value for key, value in asdict(one).items()}
            rows.append(row | {"measure": measure} | values)
    return pd.DataFrame(rows)
