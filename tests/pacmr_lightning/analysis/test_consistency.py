"""The appendix's quantities against its formulas in numpy; ties, standard errors."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.special import expit

from pacmr_lightning.analysis.consistency import consistency_by_threshold, passes
from pacmr_lightning.meta_gradient import PromptAugmentationConsistency
from pacmr_lightning.policy.numerics import clustered_standard_error

TAUS = (0.5, 0.55, 0.6, 0.7, 0.95)
REWARDS = st.floats(-20, 20).filter(lambda u: abs(u) > 1e-6)
MEANS = ["l1", "coverage", "clean_accuracy", "direction_agreement"]


def measured(pairs, taus=TAUS):
    frame = pd.DataFrame(pairs, columns=["u", "augmented_u", "clean"])
    return consistency_by_threshold(frame.assign(prompt=range(len(pairs))), taus)


def distribution(u):
    """The paper's p = [sigma(u), 1 - sigma(u)]."""
    return np.stack([expit(u), 1 - expit(u)], axis=1)


@given(st.lists(st.tuples(REWARDS, REWARDS, st.sampled_from([1, 0])), min_size=1, max_size=40))
def test_the_papers_formulas(pairs):
    u, augmented_u, clean = map(np.array, zip(*pairs, strict=True))
    p, augmented_p = distribution(u), distribution(augmented_u)
    confidence = p.max(1)
    assume(np.abs(confidence[:, None] - np.array(TAUS)).min() > 1e-9)
    label, clean_label = p.argmax(1), 1 - clean  # the paper's labels: 0 where the first response is better
    for tau, (_, found) in zip(TAUS, measured(pairs).iterrows(), strict=True):
        kept = confidence > tau
        assert found["pairs"] == len(pairs) and found["retained"] == kept.sum()
        trained, targets = PromptAugmentationConsistency(tau).targets(torch.from_numpy(u))
        assert trained.tolist() == passes(u, [tau])[:, 0].nonzero()[0].tolist() == kept.nonzero()[0].tolist()
        assert targets.tolist() == (1 - label[kept]).tolist()
        right = (label == clean_label)[kept].mean() if kept.any() else np.nan
        same = (label == augmented_p.argmax(1))[kept].mean() if kept.any() else np.nan
        l1 = np.abs(p - augmented_p).sum(1).mean()
        np.testing.assert_allclose(found[MEANS].astype(float), [l1, kept.mean(), right, same], atol=1e-12)


def test_large_rewards_and_ties():
    """sigma(u) rounds to 1 for u = 40; a tie with tau passes; u = 0 is half right."""
    tie = float(np.log(0.7 / 0.3))
    found = measured([(40.0, -40.0, 1), (tie, tie, 0), (-tie, -tie, 0), (0.0, 1.0, 1)], (0.5, 0.7, 1 - 1e-12))
    assert found["retained"].tolist() == [4, 3, 1]
    np.testing.assert_allclose(found["clean_accuracy"], [2.5 / 4, 2 / 3, 1])
    np.testing.assert_allclose(found["direction_agreement"], [2.5 / 4, 2 / 3, 0])
    with_tie = [(1.0, 1.0, 1), (-1.0, 1.0, np.nan)]  # a label that is one
    [found] = measured(with_tie, (0.5,)).to_dict("records")
    assert (found["pairs"], found["clean_accuracy"], found["direction_agreement"]) == (2, 1, 0.5)


def test_standard_error_of_clusters_is_that_of_a_bootstrap():
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(300), rng.integers(1, 9, 300))
    values = (rng.normal(size=300)[clusters] + rng.normal(size=len(clusters)) > 0).astype(float)
    sums, sizes = np.bincount(clusters, values), np.bincount(clusters)
    drawn = rng.integers(0, 300, (20_000, 300))
    bootstrap = (sums[drawn].sum(1) / sizes[drawn].sum(1)).std()
    found = clustered_standard_error(values, clusters)
    assert found == pytest.approx(bootstrap, rel=0.03)
    single = clustered_standard_error(values, np.arange(len(values)))
    assert found > 1.2 * single, "the clusters of this test must matter"
    # That of the binomial, for single pairs; and none for one cluster or for none.
    mean = values.mean()
    assert single == pytest.approx(np.sqrt(mean * (1 - mean) / (len(values) - 1)))
    assert np.isnan(clustered_standard_error(values, np.zeros(len(values), int)))
    assert np.isnan(clustered_standard_error(np.zeros(0), np.zeros(0, dtype=int)))
