"""Noise rate, slope and reliabilities of judges from simulated scores, votes and decisions."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit, logit

from pacmr_lightning.audit.asking import pairs_to_judge
from pacmr_lightning.audit.noise_rate import decide, estimate_noise_rate
from pacmr_lightning.audit.votes import Evidence


def simulated(n, rate, slope, reliabilities, seed=0, size=1.5, silent=0.1):
    """u, prompts, votes and right labels of the model itself, with exactly that noise rate."""
    rng = np.random.default_rng(seed)
    magnitude = rng.gamma(2.0, size / 2, n)
    first_better = rng.random(n) < 0.5
    leaned = np.where(rng.random(n) < expit(slope * magnitude), first_better, ~first_better)
    right = rng.permutation(n) >= round(n * rate)
    label = np.where(right, first_better, ~first_better)
    votes = np.zeros((n, len(reliabilities)), dtype=int)
    for j, a in enumerate(reliabilities):
        verdict = np.where(rng.random(n) < a, first_better, ~first_better)
        votes[:, j] = np.where(verdict == label, 1, -1) * (rng.random(n) >= silent)
    return np.where(leaned == label, magnitude, -magnitude), np.arange(n) // 2, votes, right


def fitted(u, prompts, votes, asked=None, truth=None, known=None, resamples=60):
    asked = np.ones(len(u), dtype=bool) if asked is None else asked
    truth = np.zeros(len(u), dtype=int) if truth is None else truth
    names = [f"judge {j}" for j in range(votes.shape[1])]
    evidence = Evidence(names, votes * asked[:, None], asked, truth)
    return estimate_noise_rate(u, prompts, known, resamples, evidence)


def inside(value, low, high):
    return low <= value <= high


def test_the_parameters_are_recovered():
    u, prompts, votes, right = simulated(4000, 0.3, 1.2, (0.9, 0.7, 0.5))
    found = fitted(u, prompts, votes)
    assert found.identified and found.slope == 1 and not found.fit.refused
    assert found.rate == pytest.approx(0.3, abs=0.015) and inside(0.3, found.low, found.high)
    assert np.mean(found.draws[:, 1]) == pytest.approx(1.2, abs=0.12)
    table = found.judged.table
    assert table["reliability"].to_numpy() == pytest.approx([0.9, 0.7, 0.5], abs=0.03)
    assert (table["low"] <= table["reliability"]).all() and (table["reliability"] < table["high"]).all()
    counts = table[["for_label", "against_label", "none"]].to_numpy()
    assert counts.sum(1).tolist() == [4000] * 3 and (counts.T[0] == (votes > 0).sum(0)).all()
    p = found.wrong(u)
    for low in np.arange(0, 1, 0.2):
        part = (low <= p) & (p < low + 0.2)
        assert (~right)[part].mean() == pytest.approx(p[part].mean(), abs=0.06)
    # The curve of the combined log-odds has slope 1 and the same rate.
    assert found.tenths["against"].to_numpy() == pytest.approx(found.tenths["fitted"].to_numpy(), abs=0.06)


def test_p_wrong_is_the_formula_in_float64():
    u, prompts, votes, _ = simulated(300, 0.25, 1.0, (0.8, 0.6))
    found = fitted(u, prompts, votes, resamples=5)
    for i in (0, 7, 123):
        by_hand = []
        for eps, k, *a in found.draws:
            right, wrong = (1 - eps) * expit(k * u[i]), eps * expit(-k * u[i])
            for s, reliability in zip(votes[i], a, strict=True):
                right *= {1: reliability, -1: 1 - reliability, 0: 1.0}[s]
                wrong *= {1: 1 - reliability, -1: reliability, 0: 1.0}[s]
            by_hand.append(wrong / (right + wrong))
        assert found.wrong(u)[i] == pytest.approx(np.mean(by_hand), rel=1e-10)


def test_the_fit_is_the_most_probable():
    """Against a likelihood that is written out pair by pair, on u with few values, which no bin rounds."""
    u, prompts, votes, _ = simulated(800, 0.3, 1.0, (0.8,))
    u = np.sign(u) * np.ceil(2 * np.abs(u)) / 2
    found = fitted(u, prompts, votes, resamples=2)
    table = found.judged.table
    a = table["reliability"].iloc[0]
    k = ((found.judged.log_odds - votes[:, 0] * logit(a)) / u)[0]

    def posterior(eps, k, a):
        agree = np.where(votes[:, 0] > 0, a, np.where(votes[:, 0] < 0, 1 - a, 1))
        other = np.where(votes[:, 0] > 0, 1 - a, np.where(votes[:, 0] < 0, a, 1))
        pairs = (1 - eps) * expit(k * u) * agree + eps * expit(-k * u) * other
        spread = np.log(max(k * np.abs(u).mean(), 1.5) / 1.5)
        return np.log(pairs).sum() + np.log(a * (1 - a)) - spread**2 / 2

    best = posterior(found.rate, k, a)
    for other in ((0.01, 0, 0), (-0.01, 0, 0), (0, 0.05, 0), (0, -0.05, 0), (0, 0, 0.01), (0, 0, -0.01)):
        assert posterior(found.rate + other[0], k + other[1], a + other[2]) < best


def test_the_pairs_to_judge():
    u, prompts, _, _ = simulated(2000, 0.3, 1.2, ())
    rate = estimate_noise_rate(u, prompts, 0.3, 20)
    places = pairs_to_judge(rate, u, 100)
    distance = np.abs(rate.wrong(u) - 0.5)
    assert len(set(places)) == 100 and distance[places[:75]].max() < 0.05
    assert 0.15 < distance[places[75:]].mean() < 0.45 and abs(np.mean(places[75:]) - 1000) < 400
    assert set(places) < set(pairs_to_judge(rate, u, 300))
    assert sorted(pairs_to_judge(rate, u, 5000)) == list(range(2000))


@pytest.mark.parametrize("choice", ["default", "most suspicious"])
def test_pairs_may_be_chosen_by_the_score(choice):
    """The reliability is that of all verdicts, though chosen pairs are wrong more often than others."""
    u, prompts, votes, right = simulated(6000, 0.3, 1.2, (0.8,))
    alone = estimate_noise_rate(u, prompts, None, 20)
    places = pairs_to_judge(alone, u, 1500) if choice == "default" else np.argsort(u)[:1500]
    asked = np.isin(np.arange(6000), places)
    found = fitted(u, prompts, votes, asked)
    row = found.judged.table.iloc[0]
    assert row["pairs"] == 1500 and inside(0.8, row["low"], row["high"]) and row["high"] - row["low"] < 0.15
    assert inside(0.3, found.low, found.high) and found.high - found.low < alone.high - alone.low + 0.01
    agreeing = votes[asked, 0][votes[asked, 0] != 0] > 0
    assert abs(agreeing.mean() - (0.8 * 0.7 + 0.2 * 0.3)) > 0.05  # the chosen ones are not like the others
    before, after = ((p > 0.5) == ~right for p in (alone.wrong(u), found.wrong(u)))
    assert after[asked].mean() > before[asked].mean() + 0.05


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say():
    held = []
    for seed in range(40):
        u, prompts, votes, _ = simulated(1500, 0.3, 1.2, (0.8,), seed)
        found = fitted(u, prompts, votes, np.arange(1500) % 3 == 0, resamples=100)
        row = found.judged.table.iloc[0]
        held.append((inside(0.3, found.low, found.high), inside(0.8, row["low"], row["high"])))
    # 95% of 40 are 38; binomial, p < 0.001 for fewer than 33.
    assert np.sum(held, axis=0).min() >= 33


def test_one_judge_and_a_score_of_nothing_do_not_identify_the_rate():
    """Agreement of 70% with the labels may be a perfect judge and 30% wrong labels, or neither."""
    _, prompts, votes, _ = simulated(3000, 0.3, 1.2, (0.95,))
    u = np.random.default_rng(3).normal(size=3000)
    found = fitted(u, prompts, votes)
    assert not found.identified and np.isnan(found.wrong(u)).all()
    # Three judges do without a score.
    _, prompts, votes, _ = simulated(3000, 0.3, 1.2, (0.9, 0.8, 0.8))
    found = fitted(u, prompts, votes)
    assert found.identified and inside(0.3, found.low, found.high)


def test_judges_that_guess_change_nothing():
    u, prompts, votes, _ = simulated(4000, 0.3, 1.2, (0.5,))
    alone, found = estimate_noise_rate(u, prompts, None, 60), fitted(u, prompts, votes)
    row = found.judged.table.iloc[0]
    assert inside(0.5, row["low"], row["high"]) and found.rate == pytest.approx(alone.rate, abs=0.01)
    assert found.wrong(u) == pytest.approx(alone.wrong(u), abs=0.08)


def test_decisions_anchor_the_fit():
    """Decisions on chosen pairs are truth of the same model, and none of them is needed at random."""
    u, prompts, votes, right = simulated(3000, 0.3, 0.6, (0.8,))
    truth = np.zeros(3000, dtype=int)
    places = np.argsort(u)[:100]
    truth[places] = np.where(right[places], 1, -1)
    none = np.zeros((3000, 0), dtype=int)
    alone, found = fitted(u, prompts, none), fitted(u, prompts, none, truth=truth)
    assert inside(0.3, found.low, found.high) and found.slope == pytest.approx(0.6, abs=0.2)
    assert found.high - found.low < alone.high - alone.low
    # All decided: the rate is theirs, up to a person's slips.
    everything = fitted(u, prompts, votes, truth=np.where(right, 1, -1))
    assert everything.rate == pytest.approx((~right).mean(), abs=0.01)
    voted = votes[:, 0] != 0
    said = ((votes[:, 0] > 0) == right)[voted].mean()
    assert everything.judged.table["reliability"].iloc[0] == pytest.approx(said, abs=0.01)


def test_a_known_rate_is_kept():
    u, prompts, votes, _ = simulated(2000, 0.3, 1.2, (0.8,))
    found = fitted(u, prompts, votes, known=0.2)
    assert found.rate == 0.2 and found.known and found.identified and (found.draws[:, 0] == 0.2).all()


def test_no_higher_rate_is_assumed_than_votes_leave():
    """Else u would pass for nearly certain, and a good judge that contradicts it for a poor one."""
    u, prompts, votes, right = simulated(600, 0.27, 0.5, (0.7,), seed=9)
    asked = np.random.default_rng(9).permutation(600) < 160
    evidence = Evidence(["judge"], votes * asked[:, None], asked, np.zeros(600, dtype=int))
    found, high = (estimate_noise_rate(u, prompts, rate, evidence=evidence) for rate in (None, 0.45))
    assert not found.identified and found.separates and found.high < min(0.45, found.at_most)
    pairs = pd.DataFrame({"u": u, "unpulled_u": u, "probe_u": u, "prompt": prompts})
    used = decide(pairs, "probe", None, 0.45, memorised=False, evidence=evidence)
    assert used.rate.rate == found.high and used.rate.assumed and "the judges' votes leave" in used.notes[0]
    reliability = [rate.judged.table["reliability"][0] for rate in (high, used.rate)]
    assert reliability[0] < reliability[1] < 0.75
    loss = [-np.log(np.where(right, 1 - p, p)).mean() for p in (high.wrong(u), used.rate.wrong(u))]
    assert loss[1] < loss[0] - 0.03
    assert decide(pairs, "probe", None, 0.45, memorised=True, evidence=evidence).rate.rate == 0.45
