"""Statistics of weights against numpy in float64, and the weight gap against scikit-learn."""

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.modules import metrics
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import Weights


@pytest.mark.parametrize("spread", [1e-3, 0.02, 0.4])
def test_weight_statistics(spread):
    """Over several batches; the standard deviation keeps its digits where weights hardly differ."""
    g = (0.52 + spread * (torch.rand(90, generator=torch.Generator().manual_seed(0)) - 0.5)).float()
    flipped = torch.tensor([0, 1, -1] * 30)
    statistics = metrics.WeightStatistics()
    slope = torch.linspace(0.5, 2, 90)
    for part in (slice(0, 40), slice(40, 90)):
        statistics.add(Weights(g[part], slope[part], -slope[part]), flipped[part], floor=0.3)
    found = statistics.compute()
    assert float(found.pop("weights/slope")) == pytest.approx(1.25, rel=1e-6) == -found.pop("weights/offset")
    u = torch.zeros(90, dtype=torch.double, requires_grad=True)
    log_g = (0.3 + 0.7 * (slope.double() * u - slope.double()).sigmoid()).log()
    (rise,) = torch.autograd.grad(log_g.sum(), u)
    assert float(found.pop("weights/restraint")) == pytest.approx(float((1 - 2 * rise).mean()), rel=1e-5)
    exact = g.double().numpy()
    assert float(found["weights/mean"]) == pytest.approx(exact.mean(), rel=1e-6)
    assert float(found["weights/std"]) == pytest.approx(exact.std(), rel=1e-3)
    share = exact.sum() ** 2 / (len(exact) * (exact**2).sum())
    assert float(found["weights/effective_sample_size"]) == pytest.approx(share, rel=1e-6)
    gap = exact[flipped == 0].mean() - exact[flipped == 1].mean()
    assert float(found["weights/gap"]) == pytest.approx(gap, abs=1e-6)
    for name, value in (("unflipped", 0), ("flipped", 1)):
        assert float(found[f"weights/{name}"]) == pytest.approx(exact[flipped == value].mean(), abs=1e-6)
    names = ("mean", "std", "effective_sample_size", "unflipped", "flipped", "gap")
    assert set(found) == {f"weights/{name}" for name in names}


@pytest.mark.parametrize("digits", [1, 6])
def test_weight_gap_against_scikit_learn(digits):
    """Also with many ties; scores are no probabilities, and pairs whose flip is unknown do not count."""
    generator = torch.Generator().manual_seed(0)
    flipped = torch.tensor([0, 0, 1, -1] * 100)
    weights = (torch.randn(400, generator=generator) - 0.5 * flipped).double().round(decimals=digits)
    found = metrics.weight_gap(weights, flipped)
    w, f = weights[flipped >= 0].numpy(), flipped[flipped >= 0].numpy()
    unflipped, wrong = w[f == 0].mean(), w[f == 1].mean()
    ranks = roc_auc_score(f, -w), average_precision_score(f, -w)
    expected = (unflipped, wrong, unflipped - wrong, *ranks)
    assert found == pytest.approx(dict(zip(metrics.WEIGHT_GAP, expected, strict=True)), abs=2e-6)


def test_a_restored_window_goes_on_where_the_means_are():
    """A checkpoint is read on the CPU; the device without values stands in for a GPU."""
    seen = metrics.RunningMeans(("loss",))
    seen.update({"loss": torch.tensor([1.0, 2.0])})
    state = seen.gathered_state()
    assert {value.device.type for value in state.values()} == {"cpu"}
    means = metrics.RunningMeans(("loss",)).to("meta")
    means.load_state_dict(state)
    assert {value.device.type for value in means.state_dict().values()} == {"meta"}
    again = metrics.RunningMeans(("loss",))
    again.load_state_dict(state)
    assert float(again.compute()["loss"]) == 1.5


def test_gold_accuracy_and_saturated_pairs():
    """Ties and unknown pairs have no better response; a draw that went the unlikely way is no excuse."""
    u = torch.tensor([2.0, -1.0, 0.5, -0.5, 0.0, 3.0, 3.0])
    eta = torch.tensor([0.9, 0.2, 0.4, 0.6, 0.7, 0.5, torch.nan])
    zeros = torch.zeros_like(u)
    rewards = Rewards(LogProbs(u, zeros), LogProbs(zeros, zeros), 1.0)
    assert metrics.gold_accuracy(rewards, eta).tolist() == [1, 1, 0, 0, 0.5]
    u[:2] = torch.tensor([6.9, 6.91])  # sigmoid(u) = 0.99899 and 0.999001
    values = metrics.reward_values(rewards, u)
    assert values["rewards/saturated"].tolist() == [False, True] + [False] * 5
    assert values["rewards/accuracies"].tolist() == [1, 1, 1, 0, 0.5, 1, 1]
