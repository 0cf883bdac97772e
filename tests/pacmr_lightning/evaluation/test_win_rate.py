"""Win rate and its neighbours: counts by hand, scipy's bootstrap, another optimizer, and the gold reward."""

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import minimize
from scipy.special import expit

from pacmr_lightning.embedded_world import ATTRIBUTES, World
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.answer_store import AnswerStore
from pacmr_lightning.evaluation.judging import GoldJudge, Opinion, PairJudge, Verdict
from pacmr_lightning.evaluation.response_files import pair_rows
from pacmr_lightning.evaluation.win_rate import (
    SLOPE_C,
    judge_responses,
    length_term,
    rates_at_equal_length,
    summarize,
)

OPINIONS = {
    "f": Opinion("first", "x"),
    "s": Opinion("second", "x"),
    "i": Opinion("none", "x", "no verdict"),
    "n": Opinion("none", None, "no answer"),
    "=": Opinion("none", "scores 1 and 1"),
}


class ByRule(PairJudge):
    """Says of a pair what its first response asks for: "f s" is the first one, then the second one."""

    name = "rule"
    settings = {}  # noqa: RUF012

    def compare(self, items, store):
        return [Verdict(tuple(OPINIONS[sign] for sign in item.first.split()[:2])) for item in items]


def judged_rows(first, second, judge):
    with AnswerStore(":memory:") as store:
        return judge_responses(pair_rows(first, second), judge, store)


def win_rate(first, second, judge, resamples=2):
    return summarize(judged_rows(first, second, judge), resamples=resamples)


def judged(signs, prompts=None, second="b"):
    prompts = prompts or [f"prompt {i}" for i in range(len(signs))]
    first = [{"prompt": p, "response": " ".join(s)} for p, s in zip(prompts, signs, strict=True)]
    return judged_rows(first, [{"prompt": p, "response": second} for p in prompts], ByRule())


def test_the_papers_rules():
    signs = ["ff"] * 6 + ["ss"] * 2 + ["fs"] * 2 + ["sf", "fi", "is", "ii", "fn", "nn", "=="]
    pairs = judged(signs)
    assert [one.outcome for one in pairs] == ["win"] * 6 + ["loss"] * 2 + ["tie"] * 9
    result = summarize(pairs)
    rates = [rate.value for rate in (result.win_rate, result.tie_rate, result.loss_rate, result.win_score)]
    assert rates == pytest.approx([6 / 17, 9 / 17, 2 / 17, 1 + (6 - 2) / 17])
    assert (result.flipped, result.invalid, result.unanswered) == pytest.approx((3 / 12, 4 / 34, 3 / 34))
    # The first order shows the first response first. 25 verdicts; ff and ss have one each for it.
    assert result.first_shown == pytest.approx((6 + 2 + 2 * 2 + 0 + 1 + 1 + 1) / 25)
    # TL;DR at 20% noise (table 1): 61.63% wins and a win-score of 1.4763 are 493, 195 and 112 of 800.
    result = summarize(judged(["ff"] * 493 + ["fs"] * 195 + ["ss"] * 112), resamples=10)
    assert [result.win_rate.value, result.win_score.value] == pytest.approx([0.6163, 1.4763], abs=6e-5)
    assert summarize(judged(["ff", "ss", "ff"], second="wxyz")).length_controlled_win_rate is None


def test_intervals_are_those_of_another_bootstrap():
    rng = np.random.default_rng(0)
    signs = rng.choice(["ff", "fs", "ss"], 300, p=[0.5, 0.2, 0.3]).tolist()
    result = summarize(judged(signs), resamples=8000)
    for estimate, value_of in (
        (result.win_rate, lambda s: s == "ff"),
        (result.tie_rate, lambda s: s == "fs"),
        (result.loss_rate, lambda s: s == "ss"),
        (result.win_score, lambda s: 1 + (s == "ff") - (s == "ss")),
    ):
        values = [float(value_of(s)) for s in signs]
        other = stats.bootstrap([values], np.mean, n_resamples=8000, method="percentile", random_state=1)
        assert estimate.value == pytest.approx(np.mean(values))
        assert [estimate.low, estimate.high] == pytest.approx(list(other.confidence_interval), abs=0.006)
    assert summarize(judged(signs), resamples=50) == summarize(judged(signs), resamples=50)
    assert summarize(judged(signs), seed=1, resamples=50) != summarize(judged(signs), resamples=50)


def test_intervals_are_over_prompts():
    """Nine samples of a prompt that always end alike say no more than one of them."""
    signs = ["ff", "ff", "ff", "ss", "fs"] * 16
    alone = summarize(judged(signs), resamples=2000)
    prompts = [f"prompt {i}" for i in range(80) for _ in range(9)]
    repeated = summarize(judged([s for s in signs for _ in range(9)], prompts), resamples=2000)
    assert (repeated.pairs, repeated.prompts) == (720, 80)
    assert repeated.win_score == alone.win_score
    independent = summarize(judged([s for s in signs for _ in range(9)]), resamples=2000)
    width = {name: r.win_rate.high - r.win_rate.low for name, r in (("9", repeated), ("720", independent))}
    assert width["9"] == pytest.approx(3 * width["720"], rel=0.1)


def test_length_control_and_lengths():
    rng = np.random.default_rng(3)
    points = {"f f": 1, "f s": 0.5, "s s": 0}
    first, second, expected = [], [], []
    for i in range(120):
        sign = str(rng.choice(list(points)))
        lengths = rng.integers(4, 30, 2)
        row = {"id": i, "prompt": str(i)}
        first.append(row | {"response": f"{sign} {'x' * lengths[0]} "})
        second.append(row | {"response": "y" * lengths[1]})
        expected.append((points[sign], lengths[0] + 4, lengths[1]))
    points, a, b = np.array(expected, dtype=float).T
    result = win_rate(first, second, ByRule(), resamples=200)
    assert result.mean_length == (a.mean(), b.mean())
    controlled = result.length_controlled_win_rate
    assert controlled.value == rates_at_equal_length(points, length_term(a - b), np.ones((1, 120)))[0]
    assert controlled.low < controlled.value < controlled.high


def test_a_judge_must_answer_each_question():
    class Careless(ByRule):
        def compare(self, items, store):
            return [Verdict((OPINIONS["f"],) * 2)]

    rows = [{"prompt": str(i), "response": "f f"} for i in range(3)]
    with pytest.raises(UserError, match="The judge rule gave 1 verdicts on 3 pairs; return one per pair"):
        win_rate(rows, [row | {"response": "x"} for row in rows], Careless())


def test_what_the_gold_reward_cannot_judge():
    """Its verdicts: test_judge.py. Of the next world it has other ones."""
    world, rng = World(5), np.random.default_rng(0)
    first, second = (
        [{"prompt": p, "response": " ".join(rng.permutation(ATTRIBUTES)[:4])} for p in world.prompts()]
        for _ in "ab"
    )
    assert win_rate(first, second, GoldJudge(5)).wins != win_rate(first, second, GoldJudge(6)).wins
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(UserError, match="is not of the synthetic benchmark"):
        win_rate(*([{"prompt": chat, "response": text}] for text in ("a", "b")), GoldJudge())


def loss(x, outcomes, term, counts):
    """What the fit should make least, at (theta, phi)."""
    score = x[0] + x[1] * term
    likelihood = counts * (outcomes * -np.logaddexp(0, -score) + (1 - outcomes) * -np.logaddexp(0, score))
    return x[1] ** 2 / (2 * SLOPE_C) - likelihood.sum()


def test_the_term_has_no_unit():
    differences = np.array([-3.0, 0.0, 1.0, 8.0])
    expected = np.tanh(differences / np.sqrt(np.sum((differences - 1.5) ** 2) / 3))
    for scale in (0.01, 1000.0):
        assert length_term(scale * differences) == pytest.approx(expected)
    assert length_term(np.array([4.0, 4.0, 4.0])) is None
    assert rates_at_equal_length(np.array([1, 1, 0.5]), length_term(np.zeros(3)), np.ones((1, 3))) == 2.5 / 3
    assert length_term(np.arange(1.0, 99)) is None, "no pair is near to equal lengths"


def test_another_optimizer_finds_the_same(n=150):
    """A tie is half a win and half a loss, and each sample is fitted as if it were alone."""
    rng = np.random.default_rng(n)
    differences = rng.normal(20, 50, n)
    outcomes = np.where(rng.random(n) < 0.2, 0.5, differences > rng.normal(0, 50, n))
    term = length_term(differences)
    counts = np.concatenate([np.ones((1, n)), rng.multinomial(n, np.full(n, 1 / n), size=5)])
    found = rates_at_equal_length(outcomes, term, counts)
    options = {"xatol": 1e-9, "fatol": 1e-12}
    for rate, count in zip(found, counts, strict=True):
        best = minimize(loss, np.zeros(2), (outcomes, term, count), method="Nelder-Mead", options=options)
        assert rate == pytest.approx(expit(best.x[0]), abs=1e-6)


def test_extreme_verdicts():
    term, once = length_term(np.array([-2.0, -1.0, 1.0, 2.0])), np.ones((1, 4))
    for rate in (0, 0.5, 1):
        assert rates_at_equal_length(np.full(4, rate), term, once) == pytest.approx(rate)
    # Length alone decides: no finite slope is the likeliest, and nobody is better.
    assert rates_at_equal_length(np.array([0.0, 0, 1, 1]), term, once) == pytest.approx(0.5, abs=1e-6)
    # A resample in which only wins are left.
    assert rates_at_equal_length(np.array([0.0, 0, 1, 1]), term, np.array([[0, 0, 3, 1]])) == 1
