"""The test of the flips' curve: false alarms where it holds, power where flips depend on the pair."""

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import beta, binom

from pacmr_lightning.audit import noise_rate
from pacmr_lightning.audit.flip_curve import LEVEL, goodness_of_fit, share_against
from pacmr_lightning.audit.noise_rate import estimate_noise_rate
from pacmr_lightning.audit.words import fit_in_words

from .test_noise_rate import scores


@pytest.fixture(autouse=True)
def no_mixture(monkeypatch):
    """The mixture of the same u has no part in the test of the curve, and most of the time of a share."""
    monkeypatch.setattr(noise_rate, "_mixture", lambda u: None)


def refused(worlds, known=None):
    """How many of some worlds' curves are refused; each is u and its prompts."""
    return sum(estimate_noise_rate(u, prompts, known, resamples=2).fit.refused for u, prompts in worlds)


@pytest.mark.parametrize(
    ("rate", "known", "number"),
    [(0.3, None, 2000), (0.3, 0.3, 2000), (0.0, None, 40), (0.1, None, 2000), (0.3, None, 60)],
)
def test_false_alarms(rate, known, number):
    """At the level of 5%, 80 worlds give more than 10 refusals with P below 0.2%."""
    worlds = (scores(2000, rate, prompts=number, seed=seed)[::2] for seed in range(80))
    assert refused(worlds, known) <= binom.ppf(0.998, 80, LEVEL)


def test_pairs_of_a_prompt_depend_on_each_other():
    """Each pair five times over is no more evidence against the curve than once."""
    worlds = []
    for seed in range(40):
        u, _, _ = scores(500, 0.2, seed=seed)
        worlds.append((np.repeat(u, 5), np.repeat(np.arange(500), 5)))
    assert refused(worlds) <= binom.ppf(0.998, 40, LEVEL)
    apart = ((u, np.arange(2500)) for u, _ in worlds)
    assert refused(apart) > 10, "taken for independent, they would be"


def world(kind, seed, n=6000):
    """Labels of Bradley-Terry judges, flipped in some way, and u of a policy that sees the truth blurred."""
    rng = np.random.default_rng(seed)
    gap = rng.normal(0, 2.5, n)
    u = 0.5 * (gap + rng.normal(0, 1.5, n))
    first = rng.random(n) < expit(gap)
    flips = {
        "symmetric": 0.3,
        "near ties": 0.5 * (np.abs(gap) < 1.7),
        "far pairs": 0.5 * (np.abs(gap) > 2.5),
        "judged hastily": expit(-np.abs(gap) / 3.5),
    }
    if kind == "rule":
        # In four pairs of ten one response has the favoured word, and policy and labels go by it.
        word = rng.choice([-1, 0, 1], n, p=[0.2, 0.6, 0.2])
        first = np.where((word != 0) & (rng.random(n) < 0.95), word > 0, first)
        u += 2 * word
    else:
        first ^= rng.random(n) < flips[kind]
    return np.where(first, u, -u), np.arange(n)


@pytest.mark.parametrize(
    ("kind", "known", "least", "most"),
    [
        ("symmetric", None, 0, 4),
        ("near ties", None, 10, 10),
        ("far pairs", None, 10, 10),
        # What u alone cannot show.
        ("judged hastily", None, 0, 5),
        ("rule", None, 0, 4),
        # A given share that the labels do not have.
        ("judged hastily", 0.3, 10, 10),
        ("rule", 0.3, 10, 10),
    ],
)
def test_what_it_sees(kind, known, least, most):
    assert least <= refused((world(kind, seed) for seed in range(10)), known) <= most


def test_residuals_by_hand():
    """Nothing is fitted (eps is given, k is at its bound), each pair is a prompt, the curve is a half.

    Pairs of one size stay in order, so ten parts are twenty pairs each, and since no pair is in two of them
    their covariance is diagonal: Hotelling's statistic is the sum over parts of total squared by squares.
    """
    size, against = np.ones(200), np.array(([0.0, 1.0] * 50) + [1.0] * 60 + [0.0] * 40)
    found = goodness_of_fit(size, against, np.arange(200), 0.3, 0.0, known=True)
    parts = (against - 0.5).reshape(10, 20)
    totals = parts.sum(1)
    second = (parts**2).sum(1)
    assert found.freedom == 10
    assert found.p == pytest.approx(beta.sf((totals**2 / second).sum() / 200, 5, 95), rel=1e-6)


def test_in_words():
    symmetric = estimate_noise_rate(*world("symmetric", 0), resamples=5)
    assert "do not contradict" in fit_in_words(symmetric) and "rule of thumb" in fit_in_words(symmetric)
    ties = estimate_noise_rate(*world("near ties", 0), resamples=5)
    assert "contradict the curve" in fit_in_words(ties) and "near ties" in fit_in_words(ties)
    told = fit_in_words(estimate_noise_rate(*world("rule", 0), known=0.3, resamples=5))
    assert "P(wrong) is too high" in told and "p < 0.0001" in told
    nothing = estimate_noise_rate(np.zeros(200), np.arange(200))
    assert np.isnan(nothing.fit.p) and not nothing.fit.refused and "cannot be tested" in fit_in_words(nothing)


def test_the_part_that_is_named():
    """Where half of the nearest pairs are flipped, not a part of sure pairs that fits the curve."""
    rng = np.random.default_rng(0)
    quality = rng.standard_normal(6000)
    near = np.abs(quality) < np.quantile(np.abs(quality), 0.2)
    u = 10 * np.abs(quality) * np.where(rng.random(6000) < expit(10 * np.abs(quality)), 1, -1)
    u[near & (rng.random(6000) < 0.5)] *= -1
    share = estimate_noise_rate(u, np.arange(6000), resamples=5)
    assert (share.tenths["stderr"] == 0).any()
    named = float(fit_in_words(share).split("most where |u| is about ")[1].split(":")[0])
    gaps = (share.tenths["against"] - share.tenths["fitted"]).abs()
    assert named == pytest.approx(share.tenths["size"][gaps.argmax()], rel=0.05)


def test_curve():
    np.testing.assert_allclose(share_against(0.2, 1.5, np.array([0.0, 1e9])), [0.5, 0.2])
