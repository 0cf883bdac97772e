"""Command ``pacmr judge``: win rate, win-score and intervals of one model against another."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..command_line.output import plain_table, print_result
from ..errors import UserError, check_at_least
from ..evaluation import reward_model  # noqa: F401 - for its judge's short name
from ..evaluation.answer_store import AnswerStore
from ..evaluation.judging import PairJudge, check_prices, without_verdict
from ..evaluation.win_rate import SUMMARY, JudgedPair, WinRate, judge_pairs, response_pairs
from ..files import check_writable, content_digest, local_path


def judge(
    first: str,
    second: str,
    judge: PairJudge | None = None,
    output: str | None = None,
    seed: int = 42,
    prompt_price: float | None = None,
    completion_price: float | None = None,
) -> None:
    """Compares the responses of two models, A and B, to the same prompts with a judge.

    Each pair is judged in both orders. It is a tie if the two verdicts disagree, or one is invalid or
    missing. Rows match by ``id``, else by prompt and order. Answers are stored: the same command resumes, and
    a rerun costs nothing.

    Args:
        first: JSON Lines file of A with ``prompt`` and ``response``, such as a run's ``generations.jsonl``.
        second: file of B, usually the baseline.
        judge: ``EndpointJudge`` (a chat model with the prompts of Qu et al. for its ``task``),
            ``RewardModelJudge``, or ``GoldJudge`` (synthetic benchmark).
        output: folder for ``verdicts.jsonl``, ``summary.json`` and the judge's answers; default: the folder
            ``judge`` beside the first file.
        seed: seed of the bootstrap for the intervals.
        prompt_price: price of a million prompt tokens, in any currency.
        completion_price: price of a million completion tokens.
    """
    if judge is None:
        raise UserError(
            "judge is missing; give --judge EndpointJudge with --judge.task tldr or hh, --judge "
            "RewardModelJudge with --judge.model, or --judge GoldJudge."
        )
    check_at_least(0, seed=seed)
    check_prices(prompt_price, completion_price)
    paths = [local_path(file) for file in (first, second)]
    pairs = response_pairs(first, second)
    if paths[0].samefile(paths[1]) or all(pair.identical for pair in pairs):
        raise UserError(
            f"{first} and {second} have the same {len(pairs)} responses, so there is nothing to judge; name "
            "the responses of two models."
        )
    folder = local_path(output) if output else paths[0].parent / "judge"
    check_writable("output", str(folder), folder)
    if (summary := folder / SUMMARY).exists():
        try:
            earlier = json.loads(summary.read_text(encoding="utf-8"))
            sides = [local_path(earlier.get(side, "")).resolve() for side in ("first", "second")]
        except (ValueError, AttributeError, TypeError) as error:
            raise UserError(f"{summary} is no summary of pacmr judge ({error}); remove it.") from None
        same = earlier.get("digests") == [content_digest(path) for path in paths]
        if not same and sides != [path.resolve() for path in paths]:
            raise UserError(f"{summary} is of another comparison; name another folder with --output.")
    with AnswerStore(folder / "answers.sqlite") as answers:
        result, judged, costs = judge_pairs(
            pairs, (first, second), judge, answers, folder, seed, (prompt_price, completion_price)
        )
    print_result(f"A: {first}\nB: {second}")
    _show_rates(result)
    for note in _notes(result, judged, costs, judge.name):
        print_result(f"  {note}", style="dim")
    print(f"Verdicts and summary: {folder}")


def _show_rates(result: WinRate) -> None:
    table = plain_table("", "pairs", "value", "95% interval")
    for label, count, estimate, form in (
        ("A wins (win rate)", f"{result.wins:,}", result.win_rate, "{:.1%}"),
        ("tie", f"{result.ties:,}", result.tie_rate, "{:.1%}"),
        ("B wins", f"{result.losses:,}", result.loss_rate, "{:.1%}"),
        ("win-score", "", result.win_score, "{:.3f}"),
        ("length-controlled win rate", "", result.length_controlled_win_rate, "{:.1%}"),
    ):
        if estimate is None:
            table.add_row(label, count, "-", "-")
        else:
            value, low, high = map(form.format, (estimate.value, estimate.low, estimate.high))
            table.add_row(label, count, value, f"{low} to {high}")
    print_result(table)


def _notes(result: WinRate, judged: Sequence[JudgedPair], costs: dict[str, Any], judge: str) -> Iterator[str]:
    lengths = " and ".join(f"{length:.1f}" for length in result.mean_length)
    tokens, cost = costs["tokens"], costs["cost"]
    flipped, first_shown, invalid, unanswered = (
        "-" if share is None else f"{share:.1%}"
        for share in (result.flipped, result.first_shown, result.invalid, result.unanswered)
    )
    none = "; none here, as lengths hardly overlap" if result.length_controlled_win_rate is None else ""
    yield (
        f"length-controlled: at equal length, a tie counts as half a win{none}; without length control "
        f"{result.win_score.value / 2:.1%}"
    )
    if result.win_rate.low == result.win_rate.high:
        yield "an interval of no width (all prompts have one result) says nothing about uncertainty"
    yield f"mean length of A and B: {lengths} characters"
    yield (
        f"judge {judge}: {flipped} of verdicts changed with the order, the first response won "
        f"{first_shown}, {invalid} of answers invalid, {unanswered} missing"
    )
    yield (
        f"tokens: {tokens['all']['prompt']:,} in, {tokens['all']['completion']:,} out; in this call "
        f"{tokens['now']['prompt']:,} and {tokens['now']['completion']:,}"
    ) + (f"; cost: {cost['all']:.2f}, in this call {cost['now']:.2f}" if cost else "")
    if uncounted := costs["uncounted_requests"]["all"]:
        yield f"not in these tokens: {uncounted:,} requests without a count, which the server may bill"
    yield from without_verdict(one.verdict for one in judged if one.verdict is not None)
