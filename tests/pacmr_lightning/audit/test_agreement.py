"""p, the rate of flips and reliabilities from simulated labels whose truth is known, and from real votes."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit, logit
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import GroupKFold

from pacmr_lightning.audit.agreement import SCORE_VOTES, Votes, agreement
from pacmr_lightning.audit.asking import pairs_to_judge, reliability_of_judges

from ...conftest import read_lines


def scores(n, rate, slope=1.5, spread=2.0, prompts=None, seed=0):
    """u of a calibrated policy under labels with random flips, whether each is wrong, and prompts."""
    rng = np.random.default_rng(seed)
    size = np.abs(rng.standard_normal(n)) * spread
    right_side = rng.random(n) < expit(slope * size)
    wrong = rng.random(n) < rate
    u = np.where(right_side, size, -size) * np.where(wrong, -1, 1)
    return u, wrong, rng.integers(prompts or n, size=n)


def voters(n, strength=5.0, rate=0.0, slope=1.0, number=1, seed=0):
    """Votes of annotators who differ: u and counts under the first vote, and the share who agree with it.

    The share of annotators for a side is drawn from a Beta distribution worth ``strength`` votes.
    """
    rng = np.random.default_rng(seed)
    x = 2 * rng.standard_normal(n)
    c = rate + (1 - 2 * rate) * expit(slope * x)
    share = rng.beta(strength * c, strength * (1 - c))
    votes = rng.random((n, number)) < share[:, None]
    label = votes[:, 0]
    right = (votes == label[:, None]).sum(1).astype(float)
    counts = Votes(right, number - right, np.zeros((n, 0)))
    return np.where(label, x, -x), counts, np.where(label, share, 1 - share)


def error(found):
    return np.std(found.draws[:, 0], ddof=1)


def calibrated(p, truth, within, parts=10):
    """Whether in each tenth by p the truth is near p."""
    order = np.array_split(np.argsort(p), parts)
    return np.abs([truth[part].mean() - p[part].mean() for part in order]).max() < within


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_another_annotator(rate):
    u, _, agree = voters(8000, rate=rate, seed=1)
    found = agreement(u, np.arange(8000), resamples=60)
    assert found.predicts and found.strength == SCORE_VOTES and calibrated(found.p, agree, 0.04)
    suspected = found.p < 0.5
    assert 300 < suspected.sum() < 3000 and agree[suspected].mean() < 0.5 < agree[~suspected].mean()
    second = np.random.default_rng(2).random(8000) < agree
    share, low, high = found.contradicted(suspected)
    assert low < share < high and share == pytest.approx((1 - found.p)[suspected].mean(), abs=1e-6)
    assert share == pytest.approx((~second)[suspected].mean(), abs=0.03)
    assert low - 0.03 < (~second)[suspected].mean() < high + 0.03
    total, *_ = found.contradicted(np.ones(8000, dtype=bool))
    assert total == pytest.approx((~second).mean(), abs=0.03)


@pytest.mark.parametrize("strength", [2.5, 12.0])
def test_several_votes_say_what_the_score_is_worth(strength):
    u, votes, agree = voters(6000, strength, number=5, seed=3)
    found = agreement(u, np.arange(6000), votes, resamples=10)
    assert found.strength == pytest.approx(strength, rel=0.15) and calibrated(found.p, agree, 0.03)
    c = found.rate + (1 - 2 * found.rate) * expit(found.slope * u)
    by_hand = (found.strength * c + votes.right) / (found.strength + 5)
    np.testing.assert_allclose(found.p, by_hand, atol=1e-6)
    single = agreement(u, np.arange(6000), resamples=0)
    before, after = (average_precision_score(agree < 0.5, -each.p) for each in (single, found))
    assert after > before + 0.02


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_random_flips(rate):
    u, _, prompts = scores(12000, rate, seed=1)
    found = agreement(u, prompts, resamples=60)
    assert found.predicts and found.identified
    assert found.rate == pytest.approx(rate, abs=3 * error(found)) and error(found) < 0.02
    assert found.slope == pytest.approx(1.5, rel=0.5)


def test_the_interval_holds_the_rate():
    """In 12 worlds the 95% interval misses no more than 3 times (P below 0.03% if it keeps its promise)."""
    hits = 0
    for seed in range(12):
        u, _, prompts = scores(2000, 0.3, seed=seed)
        found = agreement(u, prompts, resamples=50)
        hits += found.low <= 0.3 <= found.high
    assert hits >= 9


def test_clean_labels_have_no_flips():
    found = agreement(*scores(8000, 0.0)[::2])
    assert found.predicts and not found.identified and found.high < 0.03


def test_a_given_rate():
    """p is then the probability that a label is right, whether or not scores identify the rate."""
    u, wrong, prompts = scores(12000, 0.3, slope=0.25, seed=1)
    assert not agreement(u, prompts, resamples=10).identified
    found = agreement(u, prompts, known=0.3, resamples=10)
    assert found.identified and found.rate == found.low == found.high == 0.3
    # The unit of u does not matter.
    np.testing.assert_allclose(agreement(1000 * u, prompts, known=0.3, resamples=2).p, found.p, atol=1e-4)
    assert found.slope == pytest.approx(0.25, rel=0.2) and calibrated(found.p, ~wrong, 0.04, 8)
    np.testing.assert_allclose(found.p, expit(logit(0.7) + found.slope * u), atol=1e-6)


def test_a_given_rate_and_several_votes():
    rng = np.random.default_rng(5)
    u, wrong, _ = scores(4000, 0.3, seed=5)
    more = rng.random((4000, 3)) < np.where(wrong, 0.3, 0.7)[:, None]
    right = 1 + more.sum(1).astype(float)
    votes = Votes(right, 4 - right, np.zeros((4000, 0)))
    found = agreement(u, np.arange(4000), votes, known=0.3, resamples=2)
    assert calibrated(found.p, ~wrong, 0.05)
    tie = right == 2
    np.testing.assert_allclose(found.p[tie], expit(found.margin[tie]), atol=1e-6)


def test_random_scores_predict_nothing():
    """Of 40 worlds, more than 4 false alarms have a probability below 0.2% at two standard errors."""
    alarms = 0
    for seed in range(40):
        u = np.random.default_rng(seed).standard_normal(600)
        found = agreement(u, np.arange(600), resamples=0)
        alarms += found.predicts
        assert found.usable == found.predicts and not (found.identified and not found.predicts)
    assert alarms <= binom.ppf(0.998, 40, 0.023)
    given = agreement(u, np.arange(600), known=0.3, resamples=0)
    assert given.usable and not given.predicts


def test_pairs_of_a_prompt_count_together():
    """The same pairs ten times over are no more evidence, and those of one prompt are none."""
    u, _, _ = scores(500, 0.3, seed=5)
    once = agreement(u, np.arange(500))
    together = agreement(np.repeat(u, 10), np.repeat(np.arange(500), 10))
    apart = agreement(np.repeat(u, 10), np.arange(5000))
    assert error(together) == pytest.approx(error(once), rel=0.35)
    assert error(apart) < 0.6 * error(together)
    assert together.flips < apart.flips / 5
    assert once.gain_error == pytest.approx(together.gain_error, rel=0.2)
    one = agreement(u, np.zeros(500, dtype=int), resamples=2)
    assert not one.predicts and not one.identified


def judged(n, rate, slope, reliabilities, seed=0, size=1.5, silent=0.1):
    """u, prompts, votes with verdicts, and right labels of the model itself, with exactly that rate."""
    rng = np.random.default_rng(seed)
    magnitude = rng.gamma(2.0, size / 2, n)
    first_better = rng.random(n) < 0.5
    leaned = np.where(rng.random(n) < expit(slope * magnitude), first_better, ~first_better)
    right = rng.permutation(n) >= round(n * rate)
    label = np.where(right, first_better, ~first_better)
    verdicts = np.zeros((n, len(reliabilities)))
    for j, a in enumerate(reliabilities):
        verdict = np.where(rng.random(n) < a, first_better, ~first_better)
        verdicts[:, j] = np.where(verdict == label, 1, -1) * (rng.random(n) >= silent)
    votes = replace(Votes.single(n), verdicts=verdicts)
    return np.where(leaned == label, magnitude, -magnitude), np.arange(n) // 2, votes, right


def test_reliabilities_are_recovered():
    u, prompts, votes, right = judged(4000, 0.3, 1.2, (0.9, 0.7, 0.5))
    found = agreement(u, prompts, votes, resamples=60)
    assert found.identified and found.rate == pytest.approx(0.3, abs=0.015)
    assert found.low <= 0.3 <= found.high and found.slope == pytest.approx(1.2, abs=0.12)
    assert found.reliabilities == pytest.approx([0.9, 0.7, 0.5], abs=0.03)
    verdicts = pd.DataFrame(votes.verdicts, columns=["vote_1", "vote_2", "vote_3"]).assign(pair=range(4000))
    table = reliability_of_judges(["a", "b", "c"], verdicts, found)
    assert (table["low"] <= table["reliability"]).all() and (table["reliability"] < table["high"]).all()
    counts = table[["for_label", "against_label", "none"]].to_numpy()
    assert counts.sum(1).tolist() == [4000] * 3
    assert counts[:, 0].tolist() == (votes.verdicts > 0).sum(0).tolist()
    given = agreement(u, prompts, votes, known=0.3, resamples=2)
    assert calibrated(given.p, right, 0.05)


def test_margins_by_hand():
    u, prompts, votes, _ = judged(300, 0.25, 1.0, (0.8, 0.6))
    found, given = (agreement(u, prompts, votes, known, resamples=2) for known in (None, 0.25))
    for i in (0, 7, 123):
        for fitted in (found, given):
            right, wrong = expit(fitted.slope * u[i]), expit(-fitted.slope * u[i])
            for verdict, a in zip(votes.verdicts[i], fitted.reliabilities, strict=True):
                right *= {1: a, -1: 1 - a, 0: 1.0}[verdict]
                wrong *= {1: 1 - a, -1: a, 0: 1.0}[verdict]
            truth = right / (right + wrong)
            assert fitted.margin[i] == pytest.approx(logit(truth), rel=1e-9)
            if fitted.known:
                by_hand = 0.75 * right / (0.75 * right + 0.25 * wrong)
            else:
                vote = (1 - fitted.rate) * truth + fitted.rate * (1 - truth)
                by_hand = (SCORE_VOTES * vote + 1) / (SCORE_VOTES + 1)
            assert fitted.p[i] == pytest.approx(by_hand, rel=1e-6)


def test_the_fit_with_a_judge_is_the_most_probable():
    """Against a likelihood that is written out pair by pair, on u with few values, which no bin rounds."""
    u, prompts, votes, _ = judged(800, 0.3, 1.0, (0.8,))
    u = np.sign(u) * np.ceil(2 * np.abs(u)) / 2
    found = agreement(u, prompts, votes, resamples=2)
    said = votes.verdicts[:, 0]

    def posterior(eps, k, a):
        agree = np.where(said > 0, a, np.where(said < 0, 1 - a, 1))
        other = np.where(said > 0, 1 - a, np.where(said < 0, a, 1))
        pairs = (1 - eps) * expit(k * u) * agree + eps * expit(-k * u) * other
        spread = np.log(max(k * np.abs(u).mean(), 1.5) / 1.5)
        return np.log(pairs).sum() + np.log(a * (1 - a)) - spread**2 / 2

    place = found.rate, found.slope, found.reliabilities[0]
    for step in np.vstack([np.eye(3), -np.eye(3)]) * (0.01, 0.05, 0.01):
        assert posterior(*(place + step)) < posterior(*place)


def test_the_pairs_to_judge():
    u, prompts, _, _ = judged(2000, 0.3, 1.2, ())
    p = agreement(u, prompts, known=0.3, resamples=0).p
    places, distance = pairs_to_judge(p, 100), np.abs(p - 0.5)
    assert len(set(places)) == 100 and distance[places[:75]].max() < 0.05
    assert 0.15 < distance[places[75:]].mean() < 0.45 and abs(np.mean(places[75:]) - 1000) < 400
    assert set(places) < set(pairs_to_judge(p, 300))
    assert sorted(pairs_to_judge(p, 5000)) == list(range(2000))


def test_pairs_may_be_chosen_by_the_score_and_the_label():
    """The reliability is that of all verdicts, though chosen pairs are wrong more often than others."""
    u, prompts, votes, right = judged(6000, 0.3, 1.2, (0.8,))
    alone = agreement(u, prompts, resamples=20)
    asked = np.isin(np.arange(6000), np.argsort(u)[:1500])
    votes = replace(votes, verdicts=votes.verdicts * asked[:, None])
    found = agreement(u, prompts, votes, resamples=60)
    low, high = np.quantile(found.draws[:, 2], (0.025, 0.975))  # of the judge's reliability
    assert low <= 0.8 <= high and high - low < 0.15
    assert found.low <= 0.3 <= found.high and found.high - found.low < alone.high - alone.low + 0.01
    said = votes.verdicts[asked, 0]
    assert abs((said[said != 0] > 0).mean() - (0.8 * 0.7 + 0.2 * 0.3)) > 0.05, "they are not like the others"
    before, after = (average_precision_score(~right[asked], -each.margin[asked]) for each in (alone, found))
    assert after > before + 0.05


def test_votes_that_people_gave(shared_data):
    """Lengths alone, fitted to single votes of other debates, against the other votes on the same pairs."""
    rows = read_lines(shared_data / "ukp" / "votes.jsonl.gz")
    debates = np.unique([row["prompt"] for row in rows], return_inverse=True)[1]
    longer = np.array([len(row["chosen"]) - len(row["rejected"]) for row in rows])[:, None] / 100.0
    u = np.zeros(len(rows))
    for train, test in GroupKFold(5).split(longer, groups=debates):
        both, sides = np.concatenate([longer[train], -longer[train]]), np.repeat([1, 0], len(train))
        model = LogisticRegression(fit_intercept=False).fit(both, sides)
        u[test] = model.decision_function(longer[test])
    found = agreement(u, debates, resamples=30)
    against = np.array([row["others_against"] for row in rows])
    others = against + np.array([row["others_for"] for row in rows])
    suspected = found.p < 0.5
    share, low, high = found.contradicted(suspected)
    measured = against[suspected].sum() / others[suspected].sum()
    assert found.predicts and suspected.sum() > 1000
    assert share == pytest.approx(measured, abs=0.1) and low < measured < high
    fifths = np.array_split(np.argsort(found.p), 5)
    agreeing = [1 - against[part].sum() / others[part].sum() for part in fifths]
    assert np.all(np.diff(agreeing) > 0.02), "those with a higher p are contradicted less"
