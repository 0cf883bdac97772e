import math

import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import average_precision_score, roc_auc_score

from pacmr_lightning.flip_metrics import FLIP_METRICS, FlipMetrics, flip_metrics


def make(count=400, seed=0, unknown=0.2, scale=0.2):
    generator = torch.Generator().manual_seed(seed)
    flipped = (torch.rand(count, generator=generator) < 0.3).long()
    weights = (0.6 - 0.2 * flipped + scale * torch.randn(count, generator=generator)).double()
    flipped[torch.rand(count, generator=generator) < unknown] = -1
    return weights, flipped


def expected(weights, flipped):
    known = flipped >= 0
    w, f = weights[known].numpy(), flipped[known].numpy()
    return {
        "mean_unflipped": w[f == 0].mean(),
        "mean_flipped": w[f == 1].mean(),
        "gap": w[f == 0].mean() - w[f == 1].mean(),
        "auroc": roc_auc_score(f, -w),
        "average_precision": average_precision_score(f, -w),
    }


@pytest.mark.parametrize("scale", [0.2, 50.0])
@pytest.mark.parametrize("digits", [1, 6])
def test_against_scikit_learn(scale, digits):
    """Also with many ties, and with scores that are no probabilities."""
    weights, flipped = make(scale=scale)
    weights = (weights * 10**digits).round() / 10**digits
    found = flip_metrics(weights, flipped)
    assert tuple(found) == FLIP_METRICS
    assert found == pytest.approx(expected(weights, flipped), abs=2e-6)
    assert found["auroc"] != 0.5


def test_none_where_nothing_is_defined():
    weights = torch.tensor([0.2, 0.4, 0.6])
    unknown = flip_metrics(weights, torch.tensor([-1, -1, -1]))
    assert set(unknown.values()) == {None}
    one_kind = flip_metrics(weights, torch.tensor([0, 0, -1]))
    assert one_kind.pop("mean_unflipped") == pytest.approx(0.3)
    assert set(one_kind.values()) == {None}
    equal = flip_metrics(torch.ones(3), torch.tensor([0, 1, 1]))
    assert (equal["gap"], equal["auroc"], equal["average_precision"]) == (0.0, None, None)
    assert set(flip_metrics(torch.tensor([math.nan, 0.5]), torch.tensor([0, 1])).values()) == {None}
    assert set(flip_metrics(torch.empty(0), torch.empty(0)).values()) == {None}


def test_in_batches():
    weights, flipped = make()
    metric = FlipMetrics()
    for rows in (slice(0, 10), slice(10, 10), slice(10, None)):
        metric.update(weights[rows], flipped[rows])
    assert metric.compute() == pytest.approx(expected(weights.float(), flipped), abs=2e-6)
    metric.reset()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert set(metric.compute().values()) == {None}


def share(rank, init, folder):
    """One of two processes: 10 pairs here and the rest there, then none here and all there."""
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=2)
    weights, flipped = make()
    found = []
    for cut in (10, 0):
        rows = slice(0, cut) if rank == 0 else slice(cut, None)
        metric = FlipMetrics()
        if len(weights[rows]):
            metric.update(weights[rows], flipped[rows])
        found.append(metric.compute())
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_uneven_shares(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    processes = [context.Process(target=share, args=(rank, tmp_path / "init", tmp_path)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    weights, flipped = make()
    for rank in (0, 1):
        for found in torch.load(tmp_path / str(rank)):
            assert found == pytest.approx(expected(weights.float(), flipped), abs=2e-6)
