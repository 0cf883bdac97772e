"""The length-controlled win rate against closed forms, another optimizer, and a known truth."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, logit

from pacmr_lightning.evaluation.win_rate import SLOPE_C, length_term, rates_at_equal_length


def rate_at_equal_length(outcomes, term, counts=None):
    counts = np.ones(len(outcomes)) if counts is None else counts
    return rates_at_equal_length(outcomes, term, counts[None])[0]


def loss(x, outcomes, term, counts):
    """What the fit should make least, at (theta, phi)."""
    score = x[0] + x[1] * term
    likelihood = counts * (outcomes * -np.logaddexp(0, -score) + (1 - outcomes) * -np.logaddexp(0, score))
    return x[1] ** 2 / (2 * SLOPE_C) - likelihood.sum()


@pytest.mark.parametrize("scale", [0.01, 1.0, 1000.0])
def test_the_term_has_no_unit(scale):
    differences = np.array([-3.0, 0.0, 1.0, 8.0])
    expected = np.tanh(differences / np.sqrt(np.sum((differences - 1.5) ** 2) / 3))
    assert length_term(scale * differences) == pytest.approx(expected)


@pytest.mark.parametrize("differences", [[0.0, 0.0], [4.0, 4.0, 4.0], [4.0]])
def test_equal_differences_have_no_term(differences):
    assert length_term(np.array(differences)) is None


def test_two_lengths_by_hand():
    """With d = +-c the model fits both groups' rates p and q: theta is the mean of their log-odds."""
    wins = {1.0: (900, 1000), -1.0: (300, 1000)}
    term = np.repeat(list(wins), 1000) * np.tanh(1)
    outcomes = np.concatenate([np.arange(n) < k for k, n in wins.values()]).astype(float)
    expected = expit((logit(0.9) + logit(0.3)) / 2)
    assert rate_at_equal_length(outcomes, term) == pytest.approx(expected, abs=1e-4)
    assert outcomes.mean() == pytest.approx(0.6) and expected == pytest.approx(0.6626, abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_another_optimizer_finds_the_same(seed):
    rng = np.random.default_rng(seed)
    n = 150
    differences = rng.normal(20, 50, n)
    outcomes = rng.choice([0, 0.5, 1], n, p=[0.3, 0.2, 0.5])
    counts = rng.multinomial(n, np.full(n, 1 / n)) if seed % 2 else np.ones(n)
    term = length_term(differences)
    options = {"xatol": 1e-9, "fatol": 1e-12}
    best = minimize(loss, np.zeros(2), (outcomes, term, counts), method="Nelder-Mead", options=options)
    found = rate_at_equal_length(outcomes, term, counts if seed % 2 else None)
    assert found == pytest.approx(expit(best.x[0]), abs=1e-6)


def test_a_count_is_as_many_rows():
    rng = np.random.default_rng(0)
    outcomes, term = rng.choice([0, 0.5, 1], 60), np.tanh(rng.normal(size=60))
    counts = rng.integers(0, 4, 60)
    repeated = rate_at_equal_length(outcomes.repeat(counts), term.repeat(counts))
    assert rate_at_equal_length(outcomes, term, counts) == pytest.approx(repeated, abs=1e-8)


def test_a_preference_for_length_is_taken_out():
    """The first model is as good as the second one, but it talks more and the judge likes that."""
    rng = np.random.default_rng(0)
    differences = rng.normal(40, 50, 40_000)
    term = length_term(differences)
    outcomes = (rng.random(len(term)) < expit(2 * term)).astype(float)
    assert outcomes.mean() > 0.65
    # The standard error of theta is about 0.014, a quarter of which it is in the rate.
    assert rate_at_equal_length(outcomes, term) == pytest.approx(0.5, abs=0.012)


def test_exchanged_models_have_the_other_rate():
    rng = np.random.default_rng(1)
    outcomes, differences = rng.choice([0, 0.5, 1], 80), rng.normal(10, 5, 80)
    one = rate_at_equal_length(outcomes, length_term(differences))
    assert rate_at_equal_length(1 - outcomes, length_term(-differences)) == pytest.approx(1 - one, abs=1e-7)


def test_extreme_verdicts():
    term = length_term(np.array([-2.0, -1.0, 1.0, 2.0]))
    assert rate_at_equal_length(np.ones(4), term) == 1
    assert rate_at_equal_length(np.zeros(4), term) == 0
    assert rate_at_equal_length(np.full(4, 0.5), term) == pytest.approx(0.5)
    # Length alone decides: no finite slope is the likeliest, and nobody is better.
    assert rate_at_equal_length(np.array([0.0, 0, 1, 1]), term) == pytest.approx(0.5, abs=1e-6)
    # A resample in which only wins are left.
    assert rate_at_equal_length(np.array([0.0, 0, 1, 1]), term, np.array([0, 0, 3, 1])) == 1


@pytest.mark.parametrize("n", [7, 40, 400])
def test_many_samples(n):
    """A tie is half a win and half a loss, and each sample is fitted as if it were alone."""
    rng = np.random.default_rng(n)
    differences = rng.normal(5, 50, n)
    outcomes = np.where(rng.random(n) < 0.2, 0.5, differences > rng.normal(0, 20, n))
    term = length_term(differences)
    counts = rng.multinomial(n, np.full(n, 1 / n), size=30)
    found = rates_at_equal_length(outcomes, term, counts)
    for rate, count in zip(found, counts, strict=True):
        theta = minimize(loss, np.zeros(2), (outcomes, term, count), tol=1e-9).x[0]
        assert rate == pytest.approx(expit(theta), abs=2e-5)
