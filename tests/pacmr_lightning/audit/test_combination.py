"""The score that decisions learn: its optimum, and what it gains and loses by the pairs that were decided."""

from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from scipy.optimize import minimize
from sklearn.metrics import roc_auc_score

from pacmr_lightning.audit.combination import combined_score, views

N = 1000


def test_views_follow_the_labels():
    rows = Dataset.from_dict({"chosen_ids": [[1, 2, 3], [1]], "rejected_ids": [[1], [1, 2]]})
    pairs = SimpleNamespace(rows=rows, swapped=[False, True])
    found = views(pairs, np.array([[-3.0, -1.0], [-1.0, -5.0]]))
    assert found["length_difference"].tolist() == [2, 1]
    assert found["reference_difference"].tolist() == [-2, 4]


def test_an_independent_minimiser():
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
