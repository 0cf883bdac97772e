"""The linear probe: an independent minimiser's w, judged by other prompts alone, and wrong labels found."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold

from pacmr_lightning.audit import linear_probe
from pacmr_lightning.audit.linear_probe import FOLDS, probe_log_odds, signed_rank_agreement


def pairs(count, width=12, flips=0.3, seed=0):
    """Differences of features, three pairs a prompt, labelled by a linear reward; and what was flipped."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(count, width)) * rng.uniform(0.1, 10, size=width)
    reward = found / found.std(0) @ rng.normal(size=width)
    found *= np.where(rng.random(count) < expit(reward), 1, -1)[:, None]
    flipped = rng.random(count) < flips
    return found * np.where(flipped, -1, 1)[:, None], np.arange(count) // 3, flipped


def test_an_independent_minimiser(monkeypatch):
    """Of |w|^2 / 2C + sum log(1 + exp(-w^T d)), over the other parts' pairs, in float64."""
    monkeypatch.setattr(linear_probe, "VARIANCES", (0.1,))
    found, prompts, _ = pairs(150)
    scaled = found / np.sqrt(np.square(found).mean(0) * found.shape[1])
    assert np.square(scaled).sum(1).mean() == pytest.approx(1)
    log_odds = probe_log_odds(found, prompts)
    for learned, judged in GroupKFold(FOLDS, shuffle=True, random_state=0).split(scaled, groups=prompts):

        def loss(w, d=scaled[learned]):
            return w @ w / 0.2 + np.logaddexp(0, -d @ w).sum()

        w = minimize(loss, np.zeros(found.shape[1]), method="BFGS", tol=1e-10).x
        np.testing.assert_allclose(log_odds[judged], scaled[judged] @ w, atol=2e-3)
        assert not set(prompts[learned]) & set(prompts[judged])


def test_agreement_is_the_share_of_walsh_averages_above_zero():
    values = np.random.default_rng(0).normal(0.3, 1, 40)
    sums = values[:, None] + values
    assert signed_rank_agreement(values) == pytest.approx((sums > 0).mean())
    assert signed_rank_agreement(np.zeros(5)) == 0.5 and signed_rank_agreement(np.abs(values)) == 1


def test_wrong_labels_are_found():
    found, prompts, flipped = pairs(3000)
    with_noise = np.concatenate([found, np.random.default_rng(1).normal(size=(3000, 100))], axis=1)
    assert roc_auc_score(flipped, -probe_log_odds(with_noise, prompts)) > 0.83
    with_noise[:, -1] = 0  # a feature that never differs
    nothing = probe_log_odds(with_noise[:, 12:], prompts)
    assert abs(roc_auc_score(flipped, -nothing) - 0.5) < 0.04
