"""Hölder-DPO's estimate of the share of wrong labels: where it is exact, and how far off it is elsewhere."""

import re

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import expit

from pacmr_lightning.audit import holder_share as module
from pacmr_lightning.audit.holder_share import holder_share
from pacmr_lightning.audit.wrong_label_share import expected_share


def test_is_exact_for_a_policy_that_is_sure_and_right():
    u = np.where(np.arange(1000) < 137, -60.0, 60.0)
    assert holder_share(u) == pytest.approx(0.137, abs=1e-12)
    assert holder_share(np.where(u < 0, -1e4, 0.3)) == pytest.approx(0.137, abs=1e-12)


def test_is_the_scale_of_the_divergence():
    """1 - the scale xi of the model p / sum(p) whose density power divergence from the pairs is least."""
    u = np.random.default_rng(0).normal(1, 2, size=500)
    p = expit(u) / expit(u).sum()

    def divergence(xi):
        return (xi * p**1) @ (xi * p) ** 2 * 2 - 3 * ((xi * p) ** 2).mean()

    best = minimize_scalar(divergence, bounds=(0.01, 2), method="bounded", options={"xatol": 1e-12})
    assert holder_share(u) == pytest.approx(1 - best.x, abs=1e-6)
    assert expected_share(u, np.arange(500), resamples=2).holder == holder_share(u)


def test_what_the_docstring_says_it_makes_of_known_log_odds():
    rng = np.random.default_rng(1)
    rows = re.findall(r"^s (\S+) +(\S+)% +(\S+)% +(\S+)% +(\S+)%$", module.__doc__, re.MULTILINE)
    assert len(rows) == 4
    for spread, *said in rows:
        for flips, value in zip((0, 0.2, 0.3, 0.4), said, strict=True):
            log_odds = rng.normal(size=200_000) * float(spread)
            right = (rng.random(200_000) < expit(log_odds)) ^ (rng.random(200_000) < flips)
            found = holder_share(np.where(right, log_odds, -log_odds))
            assert 100 * found == pytest.approx(float(value), abs=0.4)


def test_is_nothing_where_the_policy_tells_nothing():
    for u in (np.zeros(10), np.full(10, -1e4), np.full(10, 1e4), np.array([-3.0])):
        assert holder_share(u) == 0
    rng = np.random.default_rng(2)
    for scale in (1e-3, 1, 1e4):
        assert 0 <= holder_share(scale * rng.normal(size=50)) < 1
