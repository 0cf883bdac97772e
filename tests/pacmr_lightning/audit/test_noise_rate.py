"""The share of wrong labels from synthetic scores whose truth is known."""

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import norm

from pacmr_lightning.audit.noise_rate import design_effect, estimate_noise_rate


def scores(n, rate, slope=1.5, spread=2.0, prompts=None, seed=0):
    """u of a calibrated policy in the order of the labels, whether each is wrong, and prompts."""
    rng = np.random.default_rng(seed)
    size = np.abs(rng.standard_normal(n)) * spread
    right_side = rng.random(n) < expit(slope * size)
    wrong = rng.random(n) < rate
    u = np.where(right_side, size, -size) * np.where(wrong, -1, 1)
    return u, wrong, rng.integers(prompts or n, size=n)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.3, 0.4])
def test_finds_the_share(rate):
    u, wrong, prompts = scores(12000, rate, seed=1)
    share = estimate_noise_rate(u, prompts, resamples=60)
    assert share.identified
    assert share.rate == pytest.approx(rate, abs=3 * share.stderr) and share.stderr < 0.02
    assert share.slope == pytest.approx(1.5, rel=0.5)
    p = share.wrong(u)
    assert p.mean() == pytest.approx(share.rate, abs=0.01)
    # Calibrated: of the labels with P(wrong) near p a share near p is wrong.
    for part in np.array_split(np.argsort(p), 8):
        assert wrong[part].mean() == pytest.approx(p[part].mean(), abs=0.06)


def test_what_the_surest_pairs_leave():
    """A bound that holds in 97.5% of the cases, and is close where the policy is sure."""
    bounds = np.array(
        [
            estimate_noise_rate(*scores(3000, 0.1, spread=4, seed=seed)[::2], resamples=2).at_most
            for seed in range(60)
        ]
    )
    assert (bounds > 0.1).sum() >= 54 and bounds.mean() < 0.15
    assert estimate_noise_rate(np.linspace(-1, 9, 500), np.arange(500), resamples=2).at_most == 3 / 50
    assert np.isnan(estimate_noise_rate(np.ones(40), np.zeros(40, int), resamples=2).at_most)


def test_other_distributions_do_not_matter():
    """Two clumps of sizes, in other units: only the course of the disagreement counts."""
    rng = np.random.default_rng(1)
    size = np.concatenate([rng.gamma(2, 0.002, 5000), rng.gamma(30, 0.001, 3000)])
    side = np.where(rng.random(8000) < expit(200 * size), 1, -1)
    u = size * side * np.where(rng.random(8000) < 0.3, -1, 1)
    share = estimate_noise_rate(u, np.arange(8000))
    assert share.identified and share.rate == pytest.approx(0.3, abs=3 * share.stderr)
    assert share.slope == pytest.approx(200, rel=0.3)
    scaled = estimate_noise_rate(1000 * u, np.arange(8000), resamples=2)
    assert scaled.rate == pytest.approx(share.rate, abs=1e-4)


def test_best_of_a_grid():
    """The fit against the likelihood of every single pair over a grid, without bins."""
    u, _, prompts = scores(3000, 0.25, seed=2)
    share = estimate_noise_rate(u, prompts, resamples=2)
    rates, slopes = np.linspace(0, 0.49, 99), np.linspace(0.3, 4, 75)
    best = max(
        (np.log(rate + (1 - 2 * rate) * expit(slope * u)).sum(), rate, slope)
        for rate in rates
        for slope in slopes
    )
    assert share.rate == pytest.approx(best[1], abs=0.01) and share.slope == pytest.approx(best[2], abs=0.1)


def test_clean_labels_are_not_called_wrong():
    share = estimate_noise_rate(*scores(8000, 0.0)[::2])
    assert share.separates and not share.identified
    assert share.high < 0.03
    assert np.isnan(share.wrong(np.array([0.0, -5.0]))).all()


def test_scores_that_say_nothing():
    rng = np.random.default_rng(3)
    u = rng.standard_normal(4000)
    share = estimate_noise_rate(u, np.arange(4000))
    assert not share.separates and not share.identified
    told = estimate_noise_rate(u, np.arange(4000), known=0.3)
    assert not told.separates and told.identified
    assert told.wrong(u) == pytest.approx(np.full(4000, 0.3), abs=0.1)


def test_pairs_that_share_a_response_are_no_evidence_each():
    """Each of 250 prompts has one chosen and 16 rejected responses, whose rewards say nothing of labels."""
    separated = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rewards = rng.standard_normal((250, 17))
        u = (rewards[:, :1] - rewards[:, 1:]).ravel()
        separated += estimate_noise_rate(u, np.repeat(np.arange(250), 16), known=0.3, resamples=2).separates
    assert separated <= 1


def test_design_effect():
    """Repeating each value k times makes the variance k times what it seems; without clusters it is 1."""
    values = (np.random.default_rng(0).random(500) < 0.3).astype(float)
    repeated = design_effect(np.repeat(values, 4), np.repeat(np.arange(500), 4))
    assert repeated == pytest.approx(4, rel=0.01)
    assert design_effect(values, np.arange(500)) == pytest.approx(1)
    assert design_effect(values, np.zeros(500, int)) == 500 and design_effect(np.ones(5), np.arange(5)) == 1


def test_a_policy_that_has_learned_nothing():
    share = estimate_noise_rate(np.zeros(200), np.arange(200))
    assert not share.identified


def test_a_policy_that_is_never_sure_identifies_nothing():
    """Where sigmoid(k m) stays near a half, the rate and k cannot be told apart."""
    share = estimate_noise_rate(*scores(4000, 0.3, slope=0.4, spread=1.0, seed=4)[::2])
    assert not share.identified or share.high - share.low > 0.15


def test_a_known_share():
    """Scores that cannot tell the share still tell labels apart where it is given, and calibrated so."""
    u, wrong, prompts = scores(12000, 0.3, slope=0.25, seed=1)
    assert not estimate_noise_rate(u, prompts, resamples=10).identified
    share = estimate_noise_rate(u, prompts, known=0.3, resamples=10)
    assert share.identified and share.rate == share.low == share.high == 0.3 and share.stderr == 0
    assert share.slope == pytest.approx(0.25, rel=0.2)
    p = share.wrong(u)
    for part in np.array_split(np.argsort(p), 8):
        assert wrong[part].mean() == pytest.approx(p[part].mean(), abs=0.04)


def test_the_interval_holds_the_truth():
    """In 25 worlds the 95% interval misses no more than 5 times (P below 0.2% if it keeps its promise)."""
    hits = 0
    for seed in range(25):
        u, _, prompts = scores(2000, 0.3, seed=seed)
        share = estimate_noise_rate(u, prompts, resamples=50)
        hits += share.low <= 0.3 <= share.high
    assert hits >= 20


def test_pairs_of_a_prompt_count_together():
    """The same pairs ten times over are no more evidence."""
    u, _, _ = scores(500, 0.3, seed=5)
    once = estimate_noise_rate(u, np.arange(500))
    together = estimate_noise_rate(np.repeat(u, 10), np.repeat(np.arange(500), 10))
    apart = estimate_noise_rate(np.repeat(u, 10), np.arange(5000))
    assert together.stderr == pytest.approx(once.stderr, rel=0.35)
    assert apart.stderr < 0.6 * together.stderr


def test_mixture():
    """Two clumps far apart are seen, one is not; tenths and their errors."""
    rng = np.random.default_rng(6)
    u = np.where(rng.random(3000) < 0.25, -4, 4) + rng.standard_normal(3000)
    two = estimate_noise_rate(u, np.arange(3000), resamples=2)
    assert two.mixture.gain > 0 and two.mixture.lower == pytest.approx(0.25, abs=0.03)
    one = estimate_noise_rate(norm.ppf(np.linspace(0.001, 0.999, 999)) + 1, np.arange(999), resamples=2)
    assert one.mixture.gain < 0
    tenths = two.tenths
    assert len(tenths) == 10 and tenths["size"].is_monotonic_increasing
    assert tenths["against"].mean() == pytest.approx((u < 0).mean())
    p = tenths["against"]
    np.testing.assert_allclose(tenths["stderr"], np.sqrt(p * (1 - p) / 299), rtol=1e-6)
