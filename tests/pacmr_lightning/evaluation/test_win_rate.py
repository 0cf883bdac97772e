"""Win rate and its neighbours: counts by hand, intervals against scipy's bootstrap, and the gold reward."""

import numpy as np
import pytest
from scipy import stats

from pacmr_lightning.embedded_world import ATTRIBUTES, World
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.judging import GoldJudge, Opinion, PairJudge, Verdict
from pacmr_lightning.evaluation.response_files import pair_rows
from pacmr_lightning.evaluation.win_rate import (
    judge_responses,
    length_term,
    rates_at_equal_length,
    summarize,
    win_rate,
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
        self.items = items
        return [Verdict(tuple(OPINIONS[sign] for sign in item.first.split()[:2])) for item in items]


def judged(signs, prompts=None, second="b"):
    prompts = prompts or [f"prompt {i}" for i in range(len(signs))]
    first = [{"prompt": p, "response": " ".join(s)} for p, s in zip(prompts, signs, strict=True)]
    return judge_responses(pair_rows(first, [{"prompt": p, "response": second} for p in prompts]), ByRule())


def test_the_papers_rules():
    """Inconsistent, invalid and unresolved are ties."""
    signs = ["ff"] * 6 + ["ss"] * 2 + ["fs"] * 2 + ["sf", "fi", "is", "ii", "fn", "nn", "=="]
    pairs = judged(signs)
    assert [one.outcome for one in pairs] == ["win"] * 6 + ["loss"] * 2 + ["tie"] * 9
    result = summarize(pairs)
    assert (result.pairs, result.prompts, result.wins, result.ties, result.losses) == (17, 17, 6, 9, 2)
    assert result.win_rate.value == pytest.approx(6 / 17)
    assert result.tie_rate.value == pytest.approx(9 / 17)
    assert result.loss_rate.value == pytest.approx(2 / 17)
    assert result.win_score.value == pytest.approx(1 + (6 - 2) / 17)
    assert result.flipped == pytest.approx(3 / 17)
    assert result.invalid == pytest.approx(4 / 34) and result.unanswered == pytest.approx(3 / 34)
    # The first order shows the first response first. 25 verdicts; ff and ss have one each for it.
    assert result.first_shown == pytest.approx((6 + 2 + 2 * 2 + 0 + 1 + 1 + 1) / 25)


def test_a_result_of_the_paper():
    """TL;DR at 20% noise (table 1): 61.63% wins and a win-score of 1.4763 are 493, 195 and 112 of 800."""
    result = summarize(judged(["ff"] * 493 + ["fs"] * 195 + ["ss"] * 112), resamples=10)
    assert result.win_rate.value == pytest.approx(0.6163, abs=6e-5)
    assert result.win_score.value == pytest.approx(1.4763, abs=6e-5)


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
        low, high = other.confidence_interval
        assert (estimate.low, estimate.high) == (
            pytest.approx(low, abs=0.006),
            pytest.approx(high, abs=0.006),
        )
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
    assert result.length_unit == "characters" and result.mean_length == (a.mean(), b.mean())
    controlled = result.length_controlled_win_rate
    assert controlled.value == rates_at_equal_length(points, length_term(a - b), np.ones((1, 120)))[0]
    assert controlled.low < controlled.value < controlled.high
    # Counts of tokens change nothing: a server's own, a server's that did not count, another tokenizer's.
    for row, other in zip(first, second, strict=True):
        row["response_tokens"], other["response_tokens"] = 0, int(rng.integers(1, 500))
    assert win_rate(first, second, ByRule(), resamples=200) == result


def test_equal_lengths_have_no_control():
    result = summarize(judged(["ff", "ss", "ff"], second="wxyz"))
    assert result.length_controlled_win_rate is None


def test_identical_and_empty_responses():
    judge = ByRule()
    texts = [("f f", " f f\n"), ("", " "), ("f f", ""), ("s s", "x")]
    rows = [[{"prompt": str(i), "response": t[side]} for i, t in enumerate(texts)] for side in (0, 1)]
    result = win_rate(*rows, judge, resamples=50)
    assert [(i.prompt, i.first, i.second) for i in judge.items] == [("2", "f f", ""), ("3", "s s", "x")]
    assert (result.wins, result.ties, result.losses) == (1, 2, 1)
    assert (result.identical, result.empty, result.flipped) == (2, (1, 2), 0)
    # Nobody is asked at all.
    same = win_rate(rows[0], rows[0], judge, resamples=50)
    assert (same.ties, same.identical, judge.items) == (4, 4, [])
    assert same.win_score.value == 1 and same.win_score.low == 1
    assert [same.flipped, same.invalid, same.unanswered, same.first_shown] == [None] * 4


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_judge_must_answer_each_question(count):
    class Careless(ByRule):
        def compare(self, items, store):
            return [Verdict((OPINIONS["f"],) * 2)] * count

    rows = [{"prompt": str(i), "response": "f f"} for i in range(3)]
    with pytest.raises(UserError, match=f"The judge rule gave {count} verdicts on 3 pairs"):
        win_rate(rows, [row | {"response": "x"} for row in rows], Careless())


def test_the_gold_reward_judges():
    world = World(5)
    rng = np.random.default_rng(0)
    prompts = world.prompts() * 2

    def sample():
        return [{"prompt": p, "response": " ".join(rng.permutation(ATTRIBUTES)[:4])} for p in prompts]

    first, second = sample(), sample()
    # The same words in another order have the same reward.
    second[7]["response"] = " ".join(reversed(first[7]["response"].split()))
    rewards = [
        [world.gold_reward(row["prompt"], row["response"]) for row in rows] for rows in (first, second)
    ]
    signs = np.sign(np.subtract(*rewards))
    result = win_rate(first, second, GoldJudge(5), resamples=100)
    assert (result.wins, result.losses) == (int((signs > 0).sum()), int((signs < 0).sum()))
    assert signs[7] == 0 and result.ties == int((signs == 0).sum())
    assert result.win_score.value == pytest.approx(1 + signs.mean())
    assert (result.pairs, result.prompts, result.flipped) == (288, 144, 0)
    # Of the next world nobody knows anything here.
    assert win_rate(first, second, GoldJudge(6), resamples=2).wins != result.wins
    best = [
        {
            "prompt": p,
            "response": " ".join(sorted(ATTRIBUTES, key=lambda word, p=p: -world.gold_reward(p, word))),
        }
        for p in prompts
    ]
    assert win_rate(best, first, GoldJudge(5), resamples=2).win_rate.value > 0.99


def test_the_gold_judge_knows_its_world_only():
    for prompt, sentence in (
        ("Hello", "'Hello' is not of the embedded world"),
        ([{"role": "user", "content": "x"}], "is a chat"),
    ):
        rows = [[{"prompt": prompt, "response": text}] for text in ("a", "b")]
        with pytest.raises(UserError, match=sentence):
            win_rate(*rows, GoldJudge())
    with pytest.raises(UserError, match="seed of the embedded world is -1"):
        GoldJudge(-1)
