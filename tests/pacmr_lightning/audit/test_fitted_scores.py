"""The linear probe and the score that decisions learn: independent minimisers' w, and what both find."""

from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold

from pacmr_lightning.audit import linear_probe
from pacmr_lightning.audit.combination import combined_score, views
from pacmr_lightning.audit.linear_probe import FOLDS, probe_log_odds, signed_rank_agreement

N = 1000


def pairs(count, width=12, flips=0.3, seed=0):
    """Differences of features, three pairs a prompt, labelled by a linear reward; and what was flipped."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(count, width)) * rng.uniform(0.1, 10, size=width)
    reward = found / found.std(0) @ rng.normal(size=width)
    found *= np.where(rng.random(count) < expit(reward), 1, -1)[:, None]
    flipped = rng.random(count) < flips
    return found * np.where(flipped, -1, 1)[:, None], np.arange(count) // 3, flipped


def test_an_independent_minimiser_of_the_probe(monkeypatch):
    """Of |w|^2 / 2C + sum log(1 + exp(-w^T d)), over the other parts' votes, in float64."""
    monkeypatch.setattr(linear_probe, "VARIANCES", (0.1,))
    found, prompts, _ = pairs(150)
    votes = np.array([[1, 0], [3, 1], [2, 2], [0, 4]])[np.arange(150) % 4]
    total = votes.sum(1, keepdims=True)
    scaled = found / np.sqrt(np.square(found).mean(0) * found.shape[1])
    assert np.square(scaled).sum(1).mean() == pytest.approx(1)
    log_odds = probe_log_odds(found, prompts, votes[:, 0] / votes.sum(1))
    for learned, judged in GroupKFold(FOLDS, shuffle=True, random_state=0).split(scaled, groups=prompts):

        def loss(w, d=scaled[learned], share=votes[learned] / total[learned]):
            return w @ w / 0.2 + (share * np.logaddexp(0, np.outer(d @ w, [-1, 1]))).sum()

        w = minimize(loss, np.zeros(found.shape[1]), method="BFGS", tol=1e-10).x
        np.testing.assert_allclose(log_odds[judged], scaled[judged] @ w, atol=2e-3)
        assert not set(prompts[learned]) & set(prompts[judged])


def test_agreement_is_the_share_of_walsh_averages_above_zero():
    values = np.random.default_rng(0).normal(0.3, 1, 40)
    sums = values[:, None] + values
    assert signed_rank_agreement(values) == pytest.approx((sums > 0).mean())
    turned = signed_rank_agreement(values * np.tile([1, -1], 20), np.tile([0.7, 0.2], 20))
    assert turned == signed_rank_agreement(values)
    assert signed_rank_agreement(np.append(values, 9), np.append(np.ones(40), 0.5)) == turned  # a tie
    assert signed_rank_agreement(np.zeros(5)) == 0.5 and signed_rank_agreement(np.abs(values)) == 1


def test_wrong_labels_are_found():
    found, prompts, flipped = pairs(3000)
    with_noise = np.concatenate([found, np.random.default_rng(1).normal(size=(3000, 100))], axis=1)
    assert roc_auc_score(flipped, -probe_log_odds(with_noise, prompts)) > 0.83
    with_noise[:, -1] = 0  # a feature that never differs
    nothing = probe_log_odds(with_noise[:, 12:], prompts)
    assert abs(roc_auc_score(flipped, -nothing) - 0.5) < 0.04


def test_views_follow_the_labels():
    rows = Dataset.from_dict({"chosen_ids": [[1, 2, 3], [1]], "rejected_ids": [[1], [1, 2]]})
    pairs = SimpleNamespace(rows=rows, swapped=[False, True])
    found = views(pairs, np.array([[-3.0, -1.0], [-1.0, -5.0]]))
    assert found["length_difference"].tolist() == [2, 1]
    assert found["reference_difference"].tolist() == [-2, 4]


def test_an_independent_minimiser_of_the_combination():
    rng = np.random.default_rng(0)
    u, others = rng.normal(size=60), rng.normal(size=(60, 2)) * [30, 5]
    truth = rng.integers(-1, 2, 60)
    score, w = combined_score(u, others, truth)
    z = np.column_stack([u, others])
    z = z / np.sqrt(np.square(z).mean(0))

    def loss(place):
        *w, b = place
        margins = truth[truth != 0] * (z[truth != 0] @ w + b)
        prior = np.square((np.array(w) - [1, 0, 0]) / 0.3).sum() + (b - np.log(3)) ** 2
        return prior / 2 + np.logaddexp(0, -margins).sum()

    best = minimize(loss, np.zeros(4), method="BFGS", tol=1e-10).x
    np.testing.assert_allclose(w, best[:3], atol=1e-4)
    np.testing.assert_allclose(score, z @ w)


def world(strength, rate, seed):
    """Two views of a gold margin and a third without meaning, under labels of which ``rate`` are wrong."""
    rng = np.random.default_rng(seed)
    gold, wrong = rng.normal(size=N), rng.random(N) < rate
    truth = np.where(rng.random(N) < 1 / (1 + np.exp(-4 * gold)), 1, -1)
    seen = np.stack([gold, strength * gold, 0 * gold]) + rng.normal(size=(3, N)) * [[2], [1], [1]]
    label = np.where(wrong, -truth, truth)
    return seen * label, wrong


@pytest.mark.parametrize(("strength", "least"), [(2.0, 0.06), (0.0, -0.01)])
def test_what_fifty_decisions_gain_on_the_others(strength, least):
    gains = []
    for seed in range(8):
        (u, *others), wrong = world(strength, 0.1 + 0.3 * (seed % 2), seed)
        places = (np.argsort(u) if seed % 4 > 1 else np.random.default_rng(0).permutation(N))[:50]
        truth = np.zeros(N, dtype=int)
        truth[places] = np.where(wrong[places], -1, 1)
        score, _ = combined_score(u, np.stack(others, axis=1), truth)
        rest = truth == 0
        gains.append(roc_auc_score(wrong[rest], -score[rest]) - roc_auc_score(wrong[rest], -u[rest]))
    assert np.mean(gains) > least
