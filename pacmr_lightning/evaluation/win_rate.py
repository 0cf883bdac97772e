"""How often one model's responses beat another's (paper, appendix on evaluation), and how far to trust it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import UserError
from .answer_store import AnswerStore, content_key
from .judging import PairJudge, Preference, Verdict
from .length_control import length_term, rates_at_equal_length
from .response_pairs import ResponsePair, pair_rows

Outcome = Literal["win", "tie", "loss"]
OUTCOMES: tuple[Outcome, ...] = ("win", "tie", "loss")


@dataclass(frozen=True)
class Judged:
    """A pair and what the judge said of it."""

    pair: ResponsePair
    verdict: Verdict | None
    """None where both responses are identical: nobody was asked, for it is a tie."""

    @property
    def outcome(self) -> Outcome:
        """Of the first response. Inconsistent, invalid and missing answers are ties."""
        outcomes: dict[Preference, Outcome] = {"first": "win", "none": "tie", "second": "loss"}
        return outcomes["none" if self.verdict is None else self.verdict.preferred]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class WinRate:
    """The first model against the second one.

    Intervals are percentiles of a bootstrap over prompts: a resample takes all pairs of a prompt or none. An
    interval of no width, where all verdicts are the same, says nothing of the uncertainty.
    """

    pairs: int
    prompts: int
    """Distinct ones."""
    wins: int
    ties: int
    losses: int
    win_rate: Estimate
    """Share of the pairs that the first model wins, as in the paper: a tie is no win."""
    tie_rate: Estimate
    loss_rate: Estimate
    win_score: Estimate
    """1 + (wins - losses) / pairs; half of it is the win rate in which a tie is half a win."""
    length_controlled_win_rate: Estimate | None
    """Win rate with ties as half a win, at equal length (``length_control``); None where all pairs differ in
    length by the same."""
    length_unit: Literal["characters"]
    """Never tokens: those of two models may be of two tokenizers, and servers also count hidden reasoning."""
    mean_length: tuple[float, float]
    empty: tuple[int, int]
    """Empty responses of each model; they are judged like others."""
    identical: int
    """Pairs of identical responses: ties about which nobody is asked, left out of the shares below."""
    flipped: float | None
    """Share of the pairs asked about in which both orders name a response, but not the same one."""
    invalid: float | None
    """Share of the answers that hold no verdict."""
    unanswered: float | None
    """Share of the questions without an answer."""
    first_shown: float | None
    """Share of the verdicts for the response that was shown first: 0.5 for a judge without a position bias,
    and for one that scores each response by itself. None where there is no verdict."""


def win_rate(
    first: Sequence[Mapping[str, Any]],
    second: Sequence[Mapping[str, Any]],
    judge: PairJudge,
    store: AnswerStore | None = None,
    seed: int = 42,
    resamples: int = 1000,
) -> WinRate:
    """Judges the responses of two models to the same prompts.

    Args:
        first: rows as ``response_pairs.pair_rows`` takes them.
        second: rows of the other model.
        judge: says which response is better.
        store: of the judge's answers; None keeps none.
        seed: of the bootstrap.
        resamples: of the bootstrap.

    Raises:
        UserError: the rows do not belong together, or the judge cannot work.
    """
    return summarize(judge_pairs(pair_rows(first, second), judge, store), seed, resamples)


def judge_pairs(
    pairs: Sequence[ResponsePair], judge: PairJudge, store: AnswerStore | None = None
) -> list[Judged]:
    """Verdicts on N pairs, in their order.

    Raises:
        UserError: the judge cannot work, does not answer each question, or gives no verdict at all.
    """
    asked = [pair for pair in pairs if not pair.identical]
    items = [pair.comparison for pair in asked]
    if store is not None:
        verdicts = judge.compare(items, store)
    else:
        with AnswerStore(":memory:") as forgotten:
            verdicts = judge.compare(items, forgotten)
    if len(verdicts) != len(items):
        raise UserError(
            f"The judge {judge.name} gave {len(verdicts)} verdicts on {len(items)} pairs, so that nobody "
            "knows which belongs to which; return one verdict a pair, in their order."
        )
    opinions = [opinion for verdict in verdicts for opinion in verdict.orders]
    if opinions and all(opinion.problem is not None for opinion in opinions):
        (problem, _), *_ = Counter(opinion.problem for opinion in opinions).most_common()
        answer = next((f": {opinion.answer.strip()[:200]!r}" for opinion in opinions if opinion.answer), "")
        raise UserError(
            f"The judge {judge.name} gave no verdict on any of {len(items)} pairs (mostly: {problem})"
            f"{answer}; name another judge, or change its options."
        )
    said = iter(verdicts)
    return [Judged(pair, None if pair.identical else next(said)) for pair in pairs]


def summarize(judged: Sequence[Judged], seed: int = 42, resamples: int = 1000) -> WinRate:
    """The numbers of N judged pairs, at least one.

    Args:
        judged: the pairs.
        seed: of the bootstrap.
        resamples: of the bootstrap.
    """
    outcomes = np.array([OUTCOMES.index(one.outcome) for one in judged])
    _, prompts = np.unique([content_key(one.pair.prompt) for one in judged], return_inverse=True)
    lengths = _lengths(judged)
    number = len(np.unique(prompts))
    draws = _draws(number, seed, resamples)

    by_prompt = np.zeros((number, len(OUTCOMES)))
    np.add.at(by_prompt, (prompts, outcomes), 1)
    counts = by_prompt.sum(0)
    resampled = draws @ by_prompt
    shares, resampled_shares = counts / counts.sum(), resampled / resampled.sum(1, keepdims=True)
    rates = [_estimate(share, resampled_shares[:, i]) for i, share in enumerate(shares)]

    points = 1 - outcomes / 2
    term = length_term(lengths[:, 0] - lengths[:, 1])
    controlled = None
    if term is not None:
        once = np.ones((1, len(judged)))
        value = rates_at_equal_length(points, term, once)[0]
        controlled = _estimate(value, rates_at_equal_length(points, term, draws[:, prompts]))
    return WinRate(
        pairs=len(judged),
        prompts=len(by_prompt),
        wins=int(counts[0]),
        ties=int(counts[1]),
        losses=int(counts[2]),
        win_rate=rates[0],
        tie_rate=rates[1],
        loss_rate=rates[2],
        win_score=_estimate(1 + shares[0] - shares[2], 1 + resampled_shares[:, 0] - resampled_shares[:, 2]),
        length_controlled_win_rate=controlled,
        length_unit="characters",
        mean_length=(float(lengths[:, 0].mean()), float(lengths[:, 1].mean())),
        empty=(
            sum(not one.pair.first.strip() for one in judged),
            sum(not one.pair.second.strip() for one in judged),
        ),
        identical=sum(one.verdict is None for one in judged),
        **_of_answers([one.verdict for one in judged if one.verdict is not None]),
    )


def _of_answers(verdicts: Sequence[Verdict]) -> dict[str, float | None]:
    opinions = [opinion for verdict in verdicts for opinion in verdict.orders]
    valid = [
        opinion.preferred == shown_first
        for verdict in verdicts
        for opinion, shown_first in zip(verdict.orders, ("first", "second"), strict=True)
        if opinion.preferred != "none"
    ]
    wrong = [opinion for opinion in opinions if opinion.problem is not None]
    return {
        "flipped": _share(sum(verdict.inconsistent for verdict in verdicts), len(verdicts)),
        "invalid": _share(sum(opinion.answer is not None for opinion in wrong), len(opinions)),
        "unanswered": _share(sum(opinion.answer is None for opinion in wrong), len(opinions)),
        "first_shown": _share(sum(valid), len(valid)),
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _lengths(judged: Sequence[Judged]) -> np.ndarray:
    """(N, 2) characters of the responses."""
    # Without space at the ends, which judges do not see.
    texts = [(one.pair.first.strip(), one.pair.second.strip()) for one in judged]
    return np.array([(len(a), len(b)) for a, b in texts], dtype=float)


def _draws(n: int, seed: int, resamples: int) -> np.ndarray:
    """(resamples, n): how often each of n prompts comes in a resample of n."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high))
