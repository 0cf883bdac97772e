"""Win rates between two models (Qu et al., appendix on evaluation), with confidence intervals and files."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from sklearn.linear_model import LogisticRegression

from ..errors import UserError
from ..files import content_digest, write_json, write_json_lines
from .answer_store import AnswerStore, content_key
from .judging import PairJudge, Preference, Prices, Verdict, check_any_verdict, price, tokens_of
from .response_files import ResponsePair, pair_rows, read_responses

Outcome = Literal["win", "tie", "loss"]
OUTCOMES: tuple[Outcome, ...] = ("win", "tie", "loss")
SLOPE_C = 100.0
"""Inverse strength of the L2 penalty on the slope, phi^2 / (2 C): weak, but enough if length decides all."""
TOLERANCE, ITERATIONS = 1e-9, 1000
"""Scikit-learn's default of 1e-4 leaves errors in the third digit of the rate for small samples."""
OVERLAP = 0.025
"""Least share of pairs in which each side is not the longer one, for a rate at equal length."""
VERDICTS, SUMMARY = "verdicts.jsonl", "summary.json"
_VERDICTS: dict[Preference, str] = {"first": "win", "second": "loss", "none": "none"}


@dataclass(frozen=True)
class JudgedPair:
    """A pair and the judge's verdict on it."""

    pair: ResponsePair
    verdict: Verdict | None
    """None for identical responses, which are ties and are not judged."""

    @property
    def outcome(self) -> Outcome:
        """The first response's outcome. Inconsistent, invalid and missing answers are ties."""
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
    """Results of the first model against the second.

    Intervals are percentiles of a bootstrap that resamples prompts with all their pairs. An interval of no
    width (all verdicts equal) says nothing about uncertainty.
    """

    pairs: int
    prompts: int
    """Distinct prompts."""
    wins: int
    ties: int
    losses: int
    win_rate: Estimate
    """Share of pairs that the first model wins; as in Qu et al., a tie is no win."""
    tie_rate: Estimate
    loss_rate: Estimate
    win_score: Estimate
    """1 + (wins - losses) / pairs: twice the win rate that counts a tie as half a win."""
    length_controlled_win_rate: Estimate | None
    """Win rate at equal length, with ties as half a win; None if lengths hardly overlap."""
    mean_length: tuple[float, float]
    """In characters: tokenizers differ, and servers count hidden reasoning."""
    identical: int
    """Pairs of identical responses: ties, not judged and not in the shares below."""
    flipped: float | None
    """Share in which the two orders name different responses, of the pairs with a verdict in both."""
    invalid: float | None
    """Share of answers without a verdict."""
    unanswered: float | None
    first_shown: float | None
    """Share of verdicts for the response shown first: 0.5 without position bias. None without verdicts."""


def judge_responses(pairs: Sequence[ResponsePair], judge: PairJudge, store: AnswerStore) -> list[JudgedPair]:
    """Return verdicts on N pairs, in their order; raise UserError if the judge gives none."""
    asked = [pair for pair in pairs if not pair.identical]
    verdicts = judge.compare(asked, store)
    if len(verdicts) != len(asked):
        raise UserError(
            f"The judge {judge.name} gave {len(verdicts)} verdicts on {len(asked)} pairs; return one per "
            "pair, in their order."
        )
    check_any_verdict(judge, verdicts)
    answers = iter(verdicts)
    return [JudgedPair(pair, None if pair.identical else next(answers)) for pair in pairs]


def summarize(judged: Sequence[JudgedPair], seed: int = 42, resamples: int = 1000) -> WinRate:
    """Return the statistics of N >= 1 judged pairs, with a bootstrap."""
    outcomes = np.array([OUTCOMES.index(one.outcome) for one in judged])
    _, prompts = np.unique([content_key(one.pair.prompt) for one in judged], return_inverse=True)
    # Judges do not see space at the ends.
    lengths = np.array([[len(one.pair.first.strip()), len(one.pair.second.strip())] for one in judged])
    counts = np.bincount(outcomes, minlength=len(OUTCOMES))
    win, tie, loss, score, draws = outcome_rates(outcomes, prompts, seed, resamples)

    points = 1 - outcomes / 2
    term = length_term(np.subtract(*lengths.T.astype(float)))
    controlled = None
    if term is not None:
        [value] = rates_at_equal_length(points, term, np.ones((1, len(judged))))
        controlled = _estimate(value, rates_at_equal_length(points, term, draws[:, prompts]))

    verdicts = [one.verdict for one in judged if one.verdict is not None]
    opinions = [opinion for verdict in verdicts for opinion in verdict.orders]
    broken = [opinion.answer is not None for opinion in opinions if opinion.problem is not None]
    whole = [verdict for verdict in verdicts if not any(opinion.problem for opinion in verdict.orders)]
    sides = [
        opinion.preferred == shown_first
        for verdict in verdicts
        for opinion, shown_first in zip(verdict.orders, ("first", "second"), strict=True)
        if opinion.preferred != "none"
    ]
    return WinRate(
        pairs=len(judged),
        prompts=draws.shape[1],
        wins=int(counts[0]),
        ties=int(counts[1]),
        losses=int(counts[2]),
        win_rate=win,
        tie_rate=tie,
        loss_rate=loss,
        win_score=score,
        length_controlled_win_rate=controlled,
        mean_length=(float(lengths[:, 0].mean()), float(lengths[:, 1].mean())),
        identical=len(judged) - len(verdicts),
        flipped=_share(sum(verdict.inconsistent for verdict in whole), len(whole)),
        invalid=_share(sum(broken), len(opinions)),
        unanswered=_share(len(broken) - sum(broken), len(opinions)),
        first_shown=_share(sum(sides), len(sides)),
    )


def outcome_rates(
    outcomes: np.ndarray, prompts: np.ndarray, seed: int = 42, resamples: int = 1000
) -> tuple[Estimate, Estimate, Estimate, Estimate, np.ndarray]:
    """Return win, tie and loss rate and win-score of N >= 1 judged pairs, with the bootstrap's draws.

    Args:
        outcomes: (N,) places in ``OUTCOMES``.
        prompts: (N,) numbers from 0 of the pairs' P prompts, which are resampled with all their pairs.
        seed: of the bootstrap.
        resamples: R.

    Returns:
        The estimates, and (R, P) counts of the prompts in each resample.
    """
    by_prompt = np.zeros((prompts.max() + 1, len(OUTCOMES)))
    np.add.at(by_prompt, (prompts, outcomes), 1)
    n = len(by_prompt)
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
    counts, resampled = by_prompt.sum(0), draws @ by_prompt
    shares, others = counts / counts.sum(), resampled / resampled.sum(1, keepdims=True)
    win, tie, loss = (_estimate(share, others[:, i]) for i, share in enumerate(shares))
    score = _estimate(1 + shares[0] - shares[2], 1 + others[:, 0] - others[:, 2])
    return win, tie, loss, score, draws


def length_term(differences: np.ndarray) -> np.ndarray | None:
    """Return tanh(d / s), with the deviation s of (N,) length differences d, which are not centred.

    None if one side is the longer one in nearly all pairs: no data is at equal length. Zeros if all are.
    """
    if min(np.mean(differences <= 0), np.mean(differences >= 0)) < OVERLAP:
        return None
    return np.tanh(differences / differences.std(ddof=1)) if differences.any() else differences


def rates_at_equal_length(outcomes: np.ndarray, term: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the (R,) length-controlled win rates of R samples of N pairs, with a tie as half a win.

    The logistic regression of length-controlled AlpacaEval (Dubois et al. 2024, arXiv 2404.04475) for two
    models: P(first wins) = sigmoid(theta + phi tanh(d / s)) by maximum likelihood; the result is
    sigmoid(theta). There is no prompt difficulty, which needs verdicts on many other models, and the only
    penalty is ``SLOPE_C`` (AlpacaEval: L1 on all coefficients, and verdicts on variants of its baseline at
    weight 0.2). ``outcomes`` (N,) are 1, 0.5 or 0; ``counts`` (R, N) tell how often a sample holds a pair.
    """
    different, which = np.unique(counts, axis=0, return_inverse=True)  # few, for few pairs
    return np.array([_rate(outcomes, term, count) for count in different])[which.reshape(-1)]


def _rate(outcomes: np.ndarray, term: np.ndarray, count: np.ndarray) -> float:
    wins, losses = count * outcomes, count * (1 - outcomes)
    # Without both, theta has no finite maximum-likelihood estimate.
    if not wins.any() or not losses.any():
        return float(wins.any())
    # The scikit-learn solver that converges, exactly, even where length decides every verdict.
    model = LogisticRegression(C=SLOPE_C, solver="newton-cg", tol=TOLERANCE, max_iter=ITERATIONS)
    won = np.repeat([True, False], len(term))
    model.fit(np.tile(term, 2)[:, None], won, sample_weight=np.concatenate([wins, losses]))
    return model.predict_proba([[0.0]])[0, 1]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high))


def reward_wins(own: np.ndarray | None, anchor: np.ndarray | None) -> dict[str, float]:
    """Win rate, and win-score = 1 + (wins - losses) / comparisons (Qu et al., appendix H), by gold reward."""
    if own is None or anchor is None or len(own) != len(anchor):
        return {}
    score = 1 + float(np.mean(np.sign(own - anchor)))
    return {"win_rate": 100 * float(np.mean(own > anchor)), "win_score": score}


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
        stored = (summary["digests"], summary["judge"], summary["seed"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return summary if stored == (digests, _about(judge), seed) else None


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
    texts = {"prompt": one.pair.prompt, "responses": [one.pair.first, one.pair.second]}
    return {"id": one.pair.id, "verdict": one.outcome, "orders": orders, **texts}
