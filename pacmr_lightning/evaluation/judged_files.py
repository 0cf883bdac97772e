"""Two files of responses under a judge: verdicts and summary in one folder."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..files import content_digest, write_json, write_json_lines
from .answer_store import AnswerStore
from .judge_calls import Prices, price
from .judging import PairJudge, Preference, tokens_of
from .response_files import ResponsePair, pair_rows, read_responses
from .win_rate import JudgedPair, WinRate, judge_responses, summarize

VERDICTS, SUMMARY = "verdicts.jsonl", "summary.json"
_VERDICTS: dict[Preference, str] = {"first": "win", "second": "loss", "none": "none"}


def response_pairs(first: str | Path, second: str | Path) -> list[ResponsePair]:
    """Return the responses of two files to the same prompts; raise UserError if they do not match."""
    return pair_rows(read_responses(first), read_responses(second), (str(first), str(second)))


def judge_pairs(
    pairs: Sequence[ResponsePair],
    files: tuple[str, str],
    judge: PairJudge,
    answers: AnswerStore,
    folder: Path,
    seed: int,
    prices: Prices = (None, None),
) -> tuple[WinRate, list[JudgedPair], dict[str, Any]]:
    """Judge the ``response_pairs`` of two files, and write verdicts and summary into a folder.

    Returns the win rate of the first file, the judged pairs, and ``tokens``, ``uncounted_requests`` and
    ``cost``: "now" of this call, "all" of all requests for these questions since there is the store.

    Raises:
        UserError: the judge gives no verdict, or the folder cannot be written to.
    """
    judged = judge_responses(pairs, judge, answers)
    result, costs = summarize(judged, seed), _costs(judged, prices)
    digests = [content_digest(file) for file in files]
    summary = {
        **{"first": files[0], "second": files[1], "digests": digests},
        **{"judge": _about(judge), "seed": seed, **asdict(result), **costs},
    }
    write_json_lines(folder / VERDICTS, map(_row, judged))
    # Last, since it says that all are there.
    write_json(folder / SUMMARY, summary, ensure_ascii=False)
    return result, judged, costs


def read_judged(folder: Path, files: tuple[Path, Path], judge: PairJudge, seed: int) -> dict[str, Any] | None:
    """Return the summary of ``judge_pairs``; None if it is missing or of other responses, judge or seed."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        digests = [content_digest(file) for file in files if file.exists()]
        found = (summary["digests"], summary["judge"], summary["seed"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return summary if found == (digests, _about(judge), seed) else None


def _about(judge: PairJudge) -> dict[str, Any]:
    return {"class": type(judge).__name__, "name": judge.name, "settings": judge.settings}


def _costs(judged: Sequence[JudgedPair], prices: Prices) -> dict[str, Any]:
    tokens, uncounted, cost = {}, {}, {}
    billed = tokens_of(one.verdict for one in judged if one.verdict is not None)
    for name, part in zip(("all", "now"), billed, strict=True):
        tokens[name] = {"prompt": part.prompt, "completion": part.completion}
        uncounted[name] = part.uncounted
        cost[name] = price(part.prompt, part.completion, prices)
    whole = None if None in cost.values() else cost
    return {"tokens": tokens, "uncounted_requests": uncounted, "cost": whole}


def _row(one: JudgedPair) -> dict[str, Any]:
    orders = [] if one.verdict is None else one.verdict.told(_VERDICTS)
    pair = one.pair
    texts = {"prompt": pair.prompt, "responses": [pair.first, pair.second]}
    return {"id": pair.id, "verdict": one.outcome, "orders": orders, **texts}
