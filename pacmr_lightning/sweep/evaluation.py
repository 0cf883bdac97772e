"""Responses of a sweep's cells under a judge, against those of the anchor's cells."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..evaluation.answer_store import AnswerStore, content_key
from ..evaluation.judging import cost_before
from ..evaluation.response_files import read_responses
from ..evaluation.win_rate import OUTCOMES, VERDICTS, judge_pairs, outcome_rates, read_judged, response_pairs
from .cells import Cell, anchor_cells
from .spec import Evaluation, Sweep
from .state import has_responses

JUDGED = "judge"
"""Folder of a cell's verdicts, inside the cell's; the default of ``pacmr judge``."""
ANSWERS = "judge-answers.sqlite"
"""The judge's answers, for all cells of a sweep's folder."""


def comparisons(sweep: Sweep, found: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Return each cell with the anchor's cell that it is compared with."""
    anchors = anchor_cells(sweep, found)
    return [(cell, anchors[cell.name]) for cell in found if cell.name in anchors]


def judged(evaluate: Evaluation, cell: Cell, anchor: Cell) -> dict[str, Any] | None:
    """Return the summary of a comparison; None if the present responses have not been judged."""
    if not (has_responses(cell) and has_responses(anchor)):
        return None
    files = (cell.responses, anchor.responses)
    return read_judged(cell.folder / JUDGED, files, evaluate.judge, evaluate.seed)


def judge_cells(sweep: Sweep, found: Sequence[Cell]) -> None:
    """Judge the responses of cells that have no verdicts yet; print the cost first.

    Raises:
        UserError: the judge fails, or responses of two cells are to other prompts.
    """
    evaluate = sweep.evaluate
    assert evaluate is not None
    left = [
        (cell, anchor)
        for cell, anchor in comparisons(sweep, found)
        if has_responses(cell)
        and has_responses(anchor)
        # None, or with questions that have no answer and are asked again.
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
            folder = cell.folder / JUDGED
            result, *_ = judge_pairs(pairs[cell.name], files, judge, answers, folder, evaluate.seed, prices)
            score, missing = result.win_score, result.unanswered
            line = f"{cell.name}: win-score {score.value:.3f} ({score.low:.3f} to {score.high:.3f})"
            if missing:
                line += f"; no answer to {missing:.1%} of the questions, which the next run asks again"
            print(line, file=sys.stderr)


def judged_wins(evaluate: Evaluation, cell: Cell, anchor: Cell | None) -> dict[str, float | None]:
    """Return win rate (%) and win-score by the judge, None for a cell that has not been judged."""
    summary = None if anchor is None else judged(evaluate, cell, anchor)
    if summary is None:
        return {"win_rate": None, "win_score": None}
    return {"win_rate": 100 * summary["win_rate"]["value"], "win_score": summary["win_score"]["value"]}


def pooled(sweep: Sweep, done: Sequence[Cell], labels: Mapping[str, str]) -> pd.DataFrame:
    """Return win rates over all seeds together, whose intervals resample prompts with all their pairs.

    One row per row of the tables (``labels``, by a cell's name), noise rate and ``measure``: ``pairs``, in %
    ``win_rate``, ``tie_rate``, pairs that ``flipped`` with the order and answers without a verdict
    (``invalid``), and ``win_score``. Columns: ``value``, and ``low`` and ``high`` of the rates and the score.
    """
    assert sweep.evaluate is not None
    groups: dict[tuple[str, float], list[tuple[dict[str, Any], pd.DataFrame]]] = {}
    for cell, anchor in comparisons(sweep, done):
        if (summary := judged(sweep.evaluate, cell, anchor)) is not None:
            verdicts = pd.DataFrame(read_responses(cell.folder / JUDGED / VERDICTS))
            groups.setdefault((labels[cell.name], cell.noise), []).append((summary, verdicts))
    found = []
    for (label, noise), members in groups.items():
        frame = pd.concat([verdicts for _, verdicts in members])
        _, prompts = np.unique(frame["prompt"].map(content_key), return_inverse=True)
        outcomes = frame["verdict"].map(OUTCOMES.index).to_numpy()
        win, tie, _, score, _ = outcome_rates(outcomes, prompts, sweep.evaluate.seed)
        row: dict[str, Any] = {"row": label, "noise": noise}
        flipped = [summary["flipped"] or 0 for summary, _ in members]
        broken = [(summary["invalid"] or 0) + (summary["unanswered"] or 0) for summary, _ in members]
        means = {"flipped": 100 * np.mean(flipped), "invalid": 100 * np.mean(broken), "pairs": len(frame)}
        found += [row | {"measure": measure, "value": value} for measure, value in means.items()]
        for measure, factor, one in (("win_rate", 100, win), ("tie_rate", 100, tie), ("win_score", 1, score)):
            values = {key: factor * value for key, value in asdict(one).items()}
            found.append(row | {"measure": measure} | values)
    return pd.DataFrame(found)
