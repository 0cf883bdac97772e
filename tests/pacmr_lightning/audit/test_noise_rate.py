"""The noise rate from synthetic scores whose truth is known, and the test of its curve."""

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import beta, binom

from pacmr_lightning.audit.flip_curve import LEVEL, goodness_of_fit
from pacmr_lightning.audit.noise_rate import design_effect, estimate_noise_rate
from pacmr_lightning.audit.words import fit_in_words


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


def test_tenths():
    rng = np.random.default_rng(6)
    u = np.where(rng.random(3000) < 0.25, -4, 4) + rng.standard_normal(3000)
    tenths = estimate_noise_rate(u, np.arange(3000), resamples=2).tenths
    assert len(tenths) == 10 and tenths["size"].is_monotonic_increasing
    assert tenths["against"].mean() == pytest.approx((u < 0).mean())
    p = tenths["against"]
    np.testing.assert_allclose(tenths["stderr"], np.sqrt(p * (1 - p) / 299), rtol=1e-6)


def refused(worlds, known=None):
    """How many of some worlds' curves are refused; each is u and its prompts."""
    return sum(estimate_noise_rate(u, prompts, known, resamples=2).fit.refused for u, prompts in worlds)


@pytest.mark.parametrize(
    ("rate", "known", "number"),
    [(0.3, None, 2000), (0.3, 0.3, 2000), (0.0, None, 40), (0.1, None, 2000), (0.3, None, 60)],
)
def test_false_alarms_of_the_fit(rate, known, number):
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


def labelled_world(kind, seed, n=6000):
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
def test_what_the_fit_sees(kind, known, least, most):
    assert least <= refused((labelled_world(kind, seed) for seed in range(10)), known) <= most


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
    symmetric = estimate_noise_rate(*labelled_world("symmetric", 0), resamples=5)
    assert "do not contradict" in fit_in_words(symmetric) and "shortcut" in fit_in_words(symmetric)
    ties = estimate_noise_rate(*labelled_world("near ties", 0), resamples=5)
    assert "contradict the curve" in fit_in_words(ties) and "near ties" in fit_in_words(ties)
    told = fit_in_words(estimate_noise_rate(*labelled_world("rule", 0), known=0.3, resamples=5))
    assert "P(wrong) is too high" in told and "p < 0.0001" in told
    nothing = estimate_noise_rate(np.zeros(200), np.arange(200))
    assert not nothing.identified and np.isnan(nothing.fit.p) and not nothing.fit.refused
    assert "cannot be tested" in fit_in_words(nothing)


def test_the_part_that_is_named():
    """Where half of the nearest pairs are flipped, not a part of sure pairs that fits the curve."""
    rng = np.random.default_rng(0)
    quality = rng.standard_normal(6000)
    near = np.abs(quality) < np.quantile(np.abs(quality), 0.2)
    u = 10 * np.abs(quality) * np.where(rng.random(6000) < expit(10 * np.abs(quality)), 1, -1)
    u[near & (rng.random(6000) < 0.5)] *= -1
    share = estimate_noise_rate(u, np.arange(6000), resamples=5)
    assert (share.tenths["stderr"] == 0).any()
    named = float(fit_in_words(share).split("most at |u| of about ")[1].split(":")[0])
    gaps = (share.tenths["against"] - share.tenths["fitted"]).abs()
    assert named == pytest.approx(share.tenths["size"][gaps.argmax()], rel=0.05)
