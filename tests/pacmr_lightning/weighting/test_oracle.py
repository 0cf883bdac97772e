"""Weightings that know the truth, and weights with mean one."""

import pytest
import torch

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import DropFlipped, OracleWeights

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
