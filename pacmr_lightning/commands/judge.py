"""Judges the responses of one model against those of another: win rate, win-score and intervals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..command_line.parser import run_tool
from ..errors import UserError
from ..evaluation.answer_store import AnswerStore, content_key
from ..evaluation.gold_judge import GoldJudge
from ..evaluation.judging import EndpointJudge, Opinion, PairJudge
from ..evaluation.response_pairs import pair_rows, read_rows
from ..evaluation.reward_model import RewardModelJudge
from ..evaluation.win_rate import Estimate, Judged, WinRate, judge_pairs, summarize
from ..files import replacing, save_figure

# The judges are imported for their short names on the command line.
__all__ = ["EndpointJudge", "GoldJudge", "RewardModelJudge", "judge_files", "main"]

ANSWERS, VERDICTS, SUMMARY, FIGURE = "answers.sqlite", "verdicts.jsonl", "summary.json", "win-rate"
"""What the output folder holds."""
MILLION = 1_000_000


def judge_files(
    first: str,
    second: str,
    judge: PairJudge | None = None,
    output: str | None = None,
    store: str | None = None,
    seed: int = 42,
    prompt_price: float | None = None,
    completion_price: float | None = None,
) -> None:
    """Judges the responses of one model (A) against those of another (B) to the same prompts.

    Each pair is judged in both orders of its responses. Where the two answers disagree, or one of them is no
    verdict or does not come, the pair is a tie. Rows belong together by ``id``, or by prompt and order where
    they have none. Answers are stored as they come, so that a killed run goes on and a rerun asks nobody.

    Args:
        first: JSON Lines file of A with ``prompt`` and ``response``, such as a run's ``generations.jsonl``.
        second: file of B, mostly the baseline's.
        judge: ``EndpointJudge`` (a chat model with the paper's prompts for its ``task``),
            ``RewardModelJudge``, or ``GoldJudge`` (embedded world).
        output: folder for ``verdicts.jsonl``, ``summary.json`` and the figure ``win-rate``; default: the
            folder ``judge`` beside the first file.
        store: file of the judge's answers; default: ``answers.sqlite`` in the output folder.
        seed: of the bootstrap behind the intervals.
        prompt_price: what a million tokens of prompts cost, in any currency.
        completion_price: likewise, of answers.

    Raises:
        UserError: a file or an option is wrong, the files do not belong together, or the judge cannot work.
    """
    if judge is None:
        raise UserError(
            "judge is missing; give --judge EndpointJudge with --judge.task tldr or hh, --judge "
            "RewardModelJudge with --judge.model, or --judge GoldJudge."
        )
    if seed < 0:
        raise UserError(f"seed is {seed}, but it must be 0 or more.")
    for option, price in (("prompt_price", prompt_price), ("completion_price", completion_price)):
        if price is not None and price < 0:
            raise UserError(f"{option} is {price}, but it must be 0 or more.")
    if (prompt_price is None) != (completion_price is None):
        raise UserError("prompt_price and completion_price only make a cost together; give both or none.")
    paths = [Path(file).expanduser() for file in (first, second)]
    pairs = pair_rows(read_rows(paths[0]), read_rows(paths[1]), (first, second))
    if paths[0].samefile(paths[1]) or all(pair.identical for pair in pairs):
        raise UserError(
            f"{first} and {second} hold the same {len(pairs)} responses, so that there is nothing to judge; "
            "name the responses of two models."
        )
    folder = Path(output).expanduser() if output else paths[0].parent / "judge"
    if folder.is_file():
        raise UserError(f"output is {folder}, which is a file; name a folder.")
    with AnswerStore(Path(store).expanduser() if store else folder / ANSWERS) as answers:
        judged = judge_pairs(pairs, judge, answers)
    result = summarize(judged, seed)
    costs = _costs(judged, prompt_price, completion_price)
    names = {"first": first, "second": second}
    told = {"class": type(judge).__name__, "name": judge.name, "settings": judge.settings}
    _write(folder, judged, {**names, "judge": told, "seed": seed, **asdict(result), **costs})
    _draw(folder, result, (first, second), judge.name)
    _show(result, judged, costs, names, judge.name)
    Console().print(f"Verdicts, summary and figure: {folder}", highlight=False, markup=False, soft_wrap=True)


def _costs(
    judged: Sequence[Judged], prompt_price: float | None, completion_price: float | None
) -> dict[str, Any]:
    """Tokens of all distinct questions, and of those that were asked now; their price where it is known."""
    opinions: dict[str, Opinion] = {}
    for one in judged:
        if one.verdict is not None:
            texts = (one.pair.first, one.pair.second)
            for opinion, shown in zip(one.verdict.orders, (texts, texts[::-1]), strict=True):
                opinions[content_key(one.pair.prompt, *shown)] = opinion
    tokens, cost = {}, {}
    for name, counted in (
        ("all", opinions.values()),
        ("now", [opinion for opinion in opinions.values() if not opinion.cached]),
    ):
        prompts = sum(opinion.prompt_tokens for opinion in counted)
        completions = sum(opinion.completion_tokens for opinion in counted)
        tokens[name] = {"prompt": prompts, "completion": completions}
        if prompt_price is not None and completion_price is not None:
            cost[name] = (prompts * prompt_price + completions * completion_price) / MILLION
    return {"tokens": tokens, "cost": cost or None}


def _write(folder: Path, judged: Sequence[Judged], summary: dict[str, Any]) -> None:
    with replacing(folder / VERDICTS) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(_row(one), ensure_ascii=False) + "\n" for one in judged)
    with replacing(folder / SUMMARY) as temporary:
        temporary.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _row(one: Judged) -> dict[str, Any]:
    """A line of the verdicts; ``orders`` shows first A, then B in the first place."""
    said = {"first": "win", "second": "loss", "none": "none"}
    orders = [
        {"verdict": said[opinion.preferred], "answer": opinion.answer, "problem": opinion.problem}
        for opinion in (one.verdict.orders if one.verdict is not None else ())
    ]
    responses = [one.pair.first, one.pair.second]
    return {
        "id": one.pair.id,
        "verdict": one.outcome,
        "orders": orders,
        "prompt": one.pair.prompt,
        "responses": responses,
    }


def _draw(folder: Path, result: WinRate, files: tuple[str, str], judge: str) -> None:
    from ..evaluation.win_rate_figure import draw

    save_figure(draw(result, files, judge), folder / FIGURE)


def _show(
    result: WinRate, judged: Sequence[Judged], costs: dict[str, Any], names: dict[str, str], judge: str
) -> None:
    console = Console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("")
    for heading in ("pairs", "value", "95% interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, count, estimate in (
        ("A wins (win rate)", result.wins, result.win_rate),
        ("tie", result.ties, result.tie_rate),
        ("B wins", result.losses, result.loss_rate),
    ):
        table.add_row(label, f"{count:,}", *_cells(estimate, "{:.1%}"))
    table.add_row("win-score", "", *_cells(result.win_score, "{:.3f}"))
    table.add_row("length-controlled win rate", "", *_cells(result.length_controlled_win_rate, "{:.1%}"))
    console.print(f"A: {names['first']}\nB: {names['second']}", highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    for note in _notes(result, judged, costs, judge):
        console.print(f"  {note}", highlight=False, markup=False, style="dim", soft_wrap=True)


def _cells(estimate: Estimate | None, form: str) -> tuple[str, str]:
    if estimate is None:
        return "-", "-"
    return form.format(estimate.value), f"{form.format(estimate.low)} to {form.format(estimate.high)}"


def _notes(result: WinRate, judged: Sequence[Judged], costs: dict[str, Any], judge: str) -> list[str]:
    lengths = " and ".join(f"{length:.1f}" for length in result.mean_length)
    tokens, cost = costs["tokens"], costs["cost"]
    spent = f"tokens: {tokens['all']['prompt']:,} in, {tokens['all']['completion']:,} out"
    spent += f", of these now {tokens['now']['prompt']:,} and {tokens['now']['completion']:,}"
    notes = [
        "length-controlled: at equal length, with a tie as half a win, which without the control is "
        f"{result.win_score.value / 2:.1%}",
        f"mean length of A and B: {lengths} {result.length_unit}",
        f"judge {judge}: {_percent(result.flipped)} of verdicts flipped with the order, the response shown "
        f"first won {_percent(result.first_shown)}, {_percent(result.invalid)} of answers invalid, "
        f"{_percent(result.unanswered)} missing",
        spent + (f"; cost: {cost['all']:.2f}, of it now {cost['now']:.2f}" if cost else ""),
    ]
    if result.identical:
        notes.append(f"{result.identical} pairs of identical responses are ties; nobody was asked")
    if any(result.empty):
        notes.append(f"empty responses, judged like others: {result.empty[0]} of A, {result.empty[1]} of B")
    opinions = [opinion for one in judged if one.verdict is not None for opinion in one.verdict.orders]
    if missing := Counter(
        opinion.problem for opinion in opinions if opinion.answer is None and opinion.problem
    ):
        notes.append(
            f"no answer to {missing.total()} questions (mostly: {missing.most_common(1)[0][0]}); a new run "
            "asks endpoints for them again"
        )
    if invalid := Counter(
        opinion.problem for opinion in opinions if opinion.answer is not None and opinion.problem
    ):
        notes.append(f"invalid answers: {invalid.total()} (mostly: {invalid.most_common(1)[0][0]})")
    return notes


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def main(arguments: list[str]) -> None:
    """``pacmr judge A.jsonl B.jsonl --judge CLASS [options]``."""
    run_tool("judge", judge_files, arguments, positional=True)
