"""Weightings that know the truth, and weights with mean one."""

import pytest
import torch

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient.step_pairs import RecomputedStepPairs
from pacmr_lightning.objectives import DPO
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import DropFlipped, OracleWeights, SigmoidPrior
from pacmr_lightning.weighting.algorithm_1 import weighted_gradient

REWARDS = Rewards(*(LogProbs(torch.zeros(5), torch.zeros(5)) for _ in range(2)), 1.0)


def test_oracle_weights(make_batch):
    """By hand, eta = 0.8 at a rate of 0.3: 0.5 0.8 / 0.62 and 0.5 0.2 / 0.38. Theorem 1: research/tests."""
    batch = make_batch(5)
    batch.eta = torch.tensor([0.8, 0.2, 0.5, 0.99, 0.01])
    weighting, other = OracleWeights(), OracleWeights()
    weighting.set_label_noise(0.3)
    g = weighting.weights(REWARDS, batch).g
    torch.testing.assert_close(g[:2], torch.tensor([0.4 / 0.62, 0.1 / 0.38]))
    other.load_state_dict(weighting.state_dict())
    assert other.label_noise == 0.3
    # Certain labels have no finite logit; without noise all count alike.
    batch.eta = torch.linspace(0, 1, 5)
    torch.testing.assert_close(OracleWeights(0.0).weights(REWARDS, batch).g, torch.full((5,), 0.5))


def test_drop_flipped(make_batch):
    assert DropFlipped().weights(REWARDS, make_batch(5)).g.tolist() == [1, 0, 1, 0, 1]


def test_bad_input():
    """Missing columns: test_cli.py."""
    with pytest.raises(UserError, match=r"rho0 is 0\.8"):
        OracleWeights(0.3, rho0=0.8)
    with pytest.raises(UserError, match=r"label_noise is 1\.0"):
        OracleWeights(1.0)


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_mean_one(micro_batch_size, make_policy, make_batch):
    """The step's gradient is that of 1/N sum_i g_i / mean(g) l_i with g held fixed."""
    weighting = SigmoidPrior(0.8, 0.3)
    weighting.mean_one = True
    policy, batch = make_policy(double=True), make_batch(6)
    batch = batch.with_reference(policy.reference_log_probs(batch))
    rewards = Rewards.of(policy.log_probs(batch), batch, 0.5)
    g = weighting.weights(rewards.detach(), batch).g
    assert g.min() < g.max()
    expected = torch.autograd.grad((g / g.mean() * DPO(0.5)(rewards)).mean(), list(policy.adapter().values()))
    pairs = RecomputedStepPairs(policy, DPO(0.5), batch, micro_batch_size)
    found = weighted_gradient(pairs, weighting).gradient
    for a, b in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-9)
