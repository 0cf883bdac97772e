import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from pacmr_lightning.modules.metrics import WEIGHT_GAP, weight_gap


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
    found = weight_gap(weights, flipped)
    assert tuple(found) == WEIGHT_GAP
    assert found == pytest.approx(expected(weights, flipped), abs=2e-6)
    assert found["auroc"] != 0.5
