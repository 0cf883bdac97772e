import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from pacmr_lightning.modules.metrics import WEIGHT_GAP, weight_gap


@pytest.mark.parametrize("digits", [1, 6])
def test_against_scikit_learn(digits):
    """Also with many ties; scores are no probabilities, and pairs whose flip is unknown do not count."""
    generator = torch.Generator().manual_seed(0)
    flipped = torch.tensor([0, 0, 1, -1] * 100)
    weights = (torch.randn(400, generator=generator) - 0.5 * flipped).double().round(decimals=digits)
    found = weight_gap(weights, flipped)
    w, f = weights[flipped >= 0].numpy(), flipped[flipped >= 0].numpy()
    unflipped, wrong = w[f == 0].mean(), w[f == 1].mean()
    ranks = roc_auc_score(f, -w), average_precision_score(f, -w)
    expected = (unflipped, wrong, unflipped - wrong, *ranks)
    assert found == pytest.approx(dict(zip(WEIGHT_GAP, expected, strict=True)), abs=2e-6)
