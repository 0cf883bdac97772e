"""PerpCorrect's mixture, threshold and selection against other ways to calculate them, in float64."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import kstest, norm

from pacmr_lightning.audit.perp_correct import SymmetricMixture, fit_mixture, selection
from pacmr_lightning.errors import UserError


def drawn(mu, sigma, alpha, count=20_000, seed=0):
    generator = np.random.default_rng(seed)
    wrong = generator.random(count) >= alpha
    return np.where(wrong, -mu, mu) + sigma * generator.standard_normal(count), wrong


@pytest.mark.parametrize(
    ("mu", "sigma", "alpha"), [(-1.0, 0.6, 0.8), (-0.02, 0.01, 0.7), (-3.0, 2.0, 0.6), (-0.5, 0.1, 0.9)]
)
def test_the_fit_finds_what_was_drawn(mu, sigma, alpha):
    values, wrong = drawn(mu, sigma, alpha)
    found = fit_mixture(values)
    np.testing.assert_allclose((found.mu, found.sigma), (mu, sigma), rtol=0.05)
    assert found.alpha == pytest.approx(1 - wrong.mean(), abs=0.02)
    assert found.problem is None
    kept = values < found.threshold
    assert found.separation == pytest.approx((kept != wrong).mean(), abs=0.02)
    assert found.wrong(values).mean() == pytest.approx(wrong.mean(), abs=0.02)

    def distribution(x):
        both = norm.cdf(x, found.mu, found.sigma), norm.cdf(x, -found.mu, found.sigma)
        return found.alpha * both[0] + (1 - found.alpha) * both[1]

    assert found.distance == pytest.approx(kstest(values, distribution).statistic, rel=1e-9)


@pytest.mark.parametrize(
    ("mu", "sigma", "alpha", "inside"),
    [
        *((-1.0, 0.6, 0.8, True), (-1.0, 1.0, 0.5, True), (-1.0, 0.9, 0.3, True)),
        *((-0.3, 1.0, 0.8, False), (-0.3, 1.0, 0.2, False), (-1.0, 0.5, 1.0, False), (-1.0, 0.5, 0.0, False)),
    ],
)
def test_the_threshold_is_where_most_labels_are_right(mu, sigma, alpha, inside):
    """As the method's code finds it, by a bounded search; inside the two means both densities are alike."""

    def left_wrong(t):
        return -alpha * norm.cdf((t - mu) / sigma) - (1 - alpha) * (1 - norm.cdf((t + mu) / sigma))

    found = SymmetricMixture(mu, sigma, alpha, 0.0)
    best = minimize_scalar(left_wrong, bounds=(mu, -mu), method="bounded", options={"xatol": 1e-10})
    assert found.threshold == pytest.approx(best.x, abs=1e-6)
    assert found.separation == pytest.approx(-best.fun, abs=1e-8)
    if inside:
        t = found.threshold
        both = alpha * norm.pdf(t, mu, sigma), (1 - alpha) * norm.pdf(t, -mu, sigma)
        assert both[0] == pytest.approx(both[1], rel=1e-12)
        assert found.wrong(np.array([t])) == pytest.approx(0.5)
    else:
        assert abs(found.threshold) == -mu


def test_the_posterior_is_that_of_bayes():
    found, x = SymmetricMixture(-0.7, 0.9, 0.65, 0.0), np.linspace(-3, 3, 7)
    right, wrong = 0.65 * norm.pdf(x, -0.7, 0.9), 0.35 * norm.pdf(x, 0.7, 0.9)
    np.testing.assert_allclose(found.wrong(x), wrong / (right + wrong), rtol=1e-12)


def test_fits_that_say_nothing_are_named():
    assert "misses the distribution" in fit_mixture(np.random.default_rng(0).exponential(size=5000)).problem
    assert fit_mixture(drawn(-1.0, 0.5, 0.2)[0]).problem == "has a noise rate of 80%"
    # The two kinds overlap so far that the best threshold between their means is worse than none by this fit,
    # which often is wrong about that.
    close = SymmetricMixture(-0.3, 1.0, 0.8, 0.0)
    assert close.separation < 0.8 and close.problem is None


@pytest.mark.parametrize("values", [np.zeros(50), np.array([0.1, np.nan, 0.2])])
def test_values_that_cannot_be_fitted(values):
    with pytest.raises(UserError, match="so labels cannot be corrected; train the rounds with another"):
        fit_mixture(values)


@pytest.mark.parametrize(("alpha", "size", "keep"), [(0.8, 10, 8), (0.5, 6, 3), (1.0, 4, 4), (0.0, 4, 0)])
def test_what_the_next_round_learns_from(alpha, size, keep):
    values = np.random.default_rng(1).standard_normal(100)
    kept, exchanged = selection(values, alpha, size)
    assert (len(kept), len(exchanged)) == (keep, size - keep)
    ranks = values.argsort().argsort()
    assert sorted(ranks[kept]) == list(range(keep))
    assert sorted(ranks[exchanged]) == list(range(100 - size + keep, 100))
