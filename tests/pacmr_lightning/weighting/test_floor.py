"""Where the margin of a pair rests under g(u), and how strongly it is held, against closed forms."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import SigmoidPrior


def g(weighting, u):
    zero = torch.zeros(1, dtype=torch.float64)
    policy = LogProbs(torch.tensor([u], dtype=torch.float64), zero)
    return weighting.weights(Rewards(policy, LogProbs(zero, zero), 1.0), None).g.item()


def force(weighting, u, q):
    """Of labels that agree with a direction with probability q: how fast DPO's gradient lets u grow."""
    return q * g(weighting, u) * expit(-u) - (1 - q) * g(weighting, -u) * expit(u)


@pytest.mark.parametrize(("slope", "offset", "floor", "rests"), [
    (0.0, 0.0, 0.0, logit(0.7)),  # DPO
    (0.5, 0.0, 0.0, 2 * logit(0.7)),  # of slope a < 1: logit(q) / (1 - a)
    (1.0, logit(0.8), 0.0, logit((0.7 - 0.2) / (1 - 2 * 0.2))),  # Theorem 1: the clean preference
    (1.0, 0.0, 0.3, 1.59),  # solved for by hand
])  # fmt: skip
def test_resting_margin(slope, offset, floor, rests):
    weighting = SigmoidPrior(slope, offset, floor)
    assert brentq(lambda u: force(weighting, u, 0.7), 0.01, 50) == pytest.approx(rests, rel=2e-3)


def test_without_a_floor_it_never_rests():
    margins = np.linspace(0.01, 12, 50)
    assert all(force(SigmoidPrior(), u, 0.55) > 0 for u in margins)
    assert force(SigmoidPrior(floor=0.3), 12, 0.55) < 0


@pytest.mark.parametrize(("slope", "offset", "floor"), [(1, 0, 0), (1.45, 0, 0), (1, 0.8, 0), (1, 0, 0.3)])
def test_restraint_near_the_start(slope, offset, floor):
    """The force falls with u as that of DPO at beta times 1 - 2 g'(0) / g(0) does, relative to its size."""
    weighting = SigmoidPrior(slope, offset, floor)
    rises = (1 - floor) * slope * expit(offset) * expit(-offset)
    expected = 1 - 2 * rises / (floor + (1 - floor) * expit(offset))
    if floor == 0:
        assert expected == pytest.approx(1 - 2 * slope * expit(-offset))
    step = 1e-4
    falls = (force(weighting, step, 0.5) - force(weighting, -step, 0.5)) / (2 * step)
    assert falls / g(weighting, 0.0) == pytest.approx(-expected / 4, abs=1e-6)
