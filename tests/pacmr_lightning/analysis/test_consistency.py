"""The appendix's quantities against its formulas in numpy; ties, swaps, ranks, standard errors."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from pacmr_lightning.analysis.consistency import PromptConsistencyMetrics, clustered_standard_error, passes
from pacmr_lightning.errors import UserError
from pacmr_lightning.weighting import PromptAugmentationConsistency

TAUS = (0.5, 0.55, 0.6, 0.7, 0.95)
REWARDS = st.floats(-20, 20).filter(lambda u: abs(u) > 1e-6)
PAIRS = st.lists(st.tuples(REWARDS, REWARDS, st.sampled_from([1, 0, -1])), min_size=1, max_size=40)


def measured(pairs, taus=TAUS, batch=7):
    u, augmented_u, clean = (list(column) for column in zip(*pairs, strict=True))
    metrics = PromptConsistencyMetrics(taus)
    for start in range(0, len(pairs), batch):
        rows = slice(start, start + batch)
        metrics.update(
            torch.tensor(u[rows], dtype=torch.float64),
            torch.tensor(augmented_u[rows], dtype=torch.float64),
            torch.tensor(clean[rows]),
        )
    return {name: value.numpy() for name, value in metrics.compute().items()}


def distribution(u):
    """The paper's p = [sigma(u), 1 - sigma(u)]."""
    first = 1 / (1 + np.exp(-np.asarray(u, dtype=np.float64)))
    return np.stack([first, 1 - first], axis=1)


@given(PAIRS, st.integers(1, 40))
def test_the_papers_formulas(pairs, batch):
    u, augmented_u, clean = map(np.array, zip(*pairs, strict=True))
    p, augmented_p = distribution(u), distribution(augmented_u)
    confidence = p.max(1)
    assume(np.abs(confidence[:, None] - np.array(TAUS)).min() > 1e-9)
    found = measured(pairs, batch=batch)
    assert found["pairs"] == len(pairs)
    np.testing.assert_allclose(found["l1"], np.abs(p - augmented_p).sum(1).mean(), atol=1e-12)
    label, clean_label = p.argmax(1), 1 - clean  # the paper's labels: 0 where the first response is better
    for t, tau in enumerate(TAUS):
        kept = confidence > tau
        known = kept & (clean != -1)
        assert found["retained"][t] == kept.sum() and found["known"][t] == known.sum()
        np.testing.assert_allclose(found["coverage"][t], kept.mean())
        right = (label == clean_label)[known].mean() if known.any() else np.nan
        np.testing.assert_allclose(found["clean_accuracy"][t], right)
        same = (label == augmented_p.argmax(1))[kept].mean() if kept.any() else np.nan
        np.testing.assert_allclose(found["direction_agreement"][t], same)


ANY_REWARD = st.one_of(REWARDS, st.just(0.0), st.sampled_from([np.log(tau / (1 - tau)) for tau in TAUS]))


@given(st.lists(st.tuples(ANY_REWARD, ANY_REWARD, st.sampled_from([1, 0, -1])), min_size=1, max_size=40))
def test_swapping_responses_and_labels_changes_nothing(pairs):
    """Also for ties, and for pairs of which only some are swapped."""
    swapped = [
        (-u, -v, {1: 0, 0: 1, -1: -1}[clean]) if i % 3 else (u, v, clean)
        for i, (u, v, clean) in enumerate(pairs)
    ]
    before, after = measured(pairs), measured(swapped)
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, atol=1e-12, err_msg=name)


def test_large_rewards_and_ties():
    """sigma(u) rounds to 1 for u = 40; a tie with tau passes; u = 0 is half right."""
    tie = float(np.log(0.7 / 0.3))
    found = measured([(40.0, -40.0, 1), (tie, tie, 0), (-tie, -tie, 0), (0.0, 1.0, 1)], (0.5, 0.7, 1 - 1e-12))
    assert found["retained"].tolist() == [4, 3, 1]
    np.testing.assert_allclose(found["clean_accuracy"], [2.5 / 4, 2 / 3, 1])
    np.testing.assert_allclose(found["direction_agreement"], [2.5 / 4, 2 / 3, 0])


@pytest.mark.parametrize("tau", [0.5, 0.6, 0.9])
def test_the_same_pairs_as_the_outer_objective(tau):
    u = torch.randn(500, generator=torch.Generator().manual_seed(0))
    kept, targets = PromptAugmentationConsistency(tau).targets(u)
    assert passes(u, [tau]).nonzero()[:, 0].tolist() == kept.tolist()
    # Its pseudo-labels as the truth are always right.
    metrics = PromptConsistencyMetrics([tau])
    metrics.update(u[kept], u[kept], targets.long())
    assert metrics.compute()["clean_accuracy"] == 1


def test_nothing_retained_or_known():
    found = measured([(0.1, 0.2, 1), (1.0, 2.0, -1)], (0.6, 0.9))
    assert found["coverage"].tolist() == [0.5, 0] and found["retained"].tolist() == [1, 0]
    assert np.isnan(found["clean_accuracy"]).all()
    assert found["direction_agreement"][0] == 1 and np.isnan(found["direction_agreement"][1])


@pytest.mark.parametrize("taus", [[], [0.4], [0.6, 1.0], [float("nan")]])
def test_bad_thresholds(taus):
    with pytest.raises(UserError, match="taus"):
        PromptConsistencyMetrics(taus)


def test_shapes_that_differ():
    with pytest.raises(ValueError, match="shapes differ"):
        PromptConsistencyMetrics([0.6]).update(torch.zeros(3), torch.zeros(3), torch.ones(3, 1))


@pytest.mark.slow
def test_two_processes(tmp_path):
    rng = np.random.default_rng(0)
    pairs = [(*rng.normal(0, 2, 2).tolist(), int(rng.integers(-1, 2))) for _ in range(57)]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    script = str(Path(__file__).with_name("ddp_consistency.py"))
    paths = [str(tmp_path / name) for name in ("init", "pairs.json", "found")]
    processes = [subprocess.Popen([sys.executable, script, str(rank), *paths]) for rank in (0, 1)]
    assert [process.wait(1200) for process in processes] == [0, 0]
    expected = measured(pairs, (0.5, 0.6, 0.9))
    for rank in (0, 1):
        for found in json.loads((tmp_path / f"found-{rank}").read_text()):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-14, err_msg=name)


def test_standard_error_of_single_pairs_is_the_binomial():
    values = np.repeat([1.0, 0.0], [70, 30])
    found = clustered_standard_error(values, np.random.default_rng(0).permutation(200)[:100])
    assert found == pytest.approx(np.sqrt(0.7 * 0.3 / 99))


def test_standard_error_of_clusters_is_that_of_a_bootstrap():
    """Resampling whole clusters, of uneven sizes and with values that depend on each other within them."""
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


def test_standard_error_of_one_cluster_or_none():
    assert np.isnan(clustered_standard_error(np.array([1.0, 0.0]), np.array([3, 3])))
    assert np.isnan(clustered_standard_error(np.zeros(0), np.zeros(0, dtype=int)))
