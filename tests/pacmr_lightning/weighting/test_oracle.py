"""Weightings that know the truth, and weights with mean one."""

import math

import pytest
import torch

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient.step_pairs import RecomputedStepPairs
from pacmr_lightning.objectives import DPO
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import DropFlipped, OracleWeights, SigmoidPrior
from pacmr_lightning.weighting.weighted_gradient import weighted_gradient

REWARDS = Rewards(*(LogProbs(torch.zeros(5), torch.zeros(5)) for _ in range(2)), 1.0)


def test_oracle_weights_recover_the_clean_optimum(make_batch):
    """The minimum of g(eta) q l(u) + g(1 - eta) (1 - q) l(-u) is u = logit(eta), q = 0.7 eta + 0.3 (1 - eta).

    By hand, eta = 0.8: q = 0.62, g(0.8) = 0.5 0.8 / 0.62 and g(0.2) = 0.5 0.2 / 0.38, and
    logit(q) + log(g(0.8) / g(0.2)) = log(0.62 / 0.38) + log(4 0.38 / 0.62) = log 4.
    """
    batch = make_batch(5)
    batch.eta = torch.tensor([0.8, 0.2, 0.5, 0.99, 0.01])
    weighting = OracleWeights()
    weighting.set_label_noise(0.3)
    g = weighting.weights(REWARDS, batch).g
    torch.testing.assert_close(g[:2], torch.tensor([0.4 / 0.62, 0.1 / 0.38]))
    q = 0.7 * batch.eta + 0.3 * (1 - batch.eta)
    mirrored = g[[1, 0, 2, 4, 3]]
    torch.testing.assert_close(
        torch.logit(q) + (g / mirrored).log(), torch.logit(batch.eta), atol=1e-5, rtol=0
    )
    assert math.isclose(float(torch.logit(q)[0] + (g / mirrored).log()[0]), math.log(4), abs_tol=1e-5)
    other = OracleWeights()
    other.load_state_dict(weighting.state_dict())
    assert other.label_noise == 0.3


def test_no_noise_weighs_all_alike(make_batch):
    batch = make_batch(5)
    batch.eta = torch.linspace(0, 1, 5)  # certain labels have no finite logit
    torch.testing.assert_close(OracleWeights(0.0).weights(REWARDS, batch).g, torch.full((5,), 0.5))


def test_drop_flipped(make_batch):
    batch = make_batch(5)
    assert DropFlipped().weights(REWARDS, batch).g.tolist() == [1, 0, 1, 0, 1]
    batch.flipped[2] = -1
    with pytest.raises(UserError, match="column flipped"):
        DropFlipped().weights(REWARDS, batch)


def test_bad_input(make_batch):
    batch = make_batch(5)
    with pytest.raises(UserError, match="column eta"):
        OracleWeights(0.3).weights(REWARDS, batch)
    batch.eta = torch.full((5,), 0.5)
    with pytest.raises(UserError, match="no datamodule"):
        OracleWeights().weights(REWARDS, batch)
    with pytest.raises(UserError, match=r"rho0 is 0\.8"):
        OracleWeights(0.3, rho0=0.8)
    with pytest.raises(UserError, match=r"label_noise is 1\.0"):
        OracleWeights(1.0)


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("make", [lambda: SigmoidPrior(0.8, 0.3, mean_one=True), lambda: DropFlipped(True)])
def test_mean_one(make, micro_batch_size, make_policy, make_batch):
    """The step's gradient is that of 1/N sum_i g_i / mean(g) l_i with g held fixed."""
    policy, batch = make_policy(double=True), make_batch(6)
    batch = batch.with_reference(policy.reference_log_probs(batch))
    rewards = Rewards.of(policy.log_probs(batch), batch, 0.5)
    g = make().weights(rewards.detach(), batch).g
    assert g.min() < g.max()
    expected = torch.autograd.grad((g / g.mean() * DPO(0.5)(rewards)).mean(), list(policy.adapter().values()))
    found = weighted_gradient(RecomputedStepPairs(policy, DPO(0.5), batch, micro_batch_size), make()).gradient
    for a, b in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-9)
