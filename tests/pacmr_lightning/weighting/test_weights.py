"""Weights and soft labels that are no VNet's: from the truth, an audit and a prior.

test_combinations.py has the gradients of soft labels, research/tests the theory.
"""

import pandas as pd
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.metrics import restraint
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import AuditedWeights, DropFlipped, OracleWeights, SigmoidPrior, Unweighted

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


def test_hard_probabilities_of_an_audit(tmp_path, make_batch):
    file, batch = tmp_path / "pairs.parquet", make_batch(5)
    table = {"id": batch.ids, "p": 0.5, "p_majority": [0.8, 0.5, 0.3, 1, 0], "observed": "chosen"}
    pd.DataFrame(table | {"texts": "", "p": float("nan")}).to_parquet(file)
    with pytest.warns(UserWarning, match="predict its labels no better than a coin"):
        AuditedWeights(str(file)).weights(REWARDS, batch)
    suggested = ["keep", "swap", "keep", "keep", "swap"]  # at another threshold than one half
    pd.DataFrame(table | {"texts": "", "suggested": suggested}).to_parquet(file)
    assert AuditedWeights(str(file), hard=True).weights(REWARDS, batch).g.tolist() == [1, 0, 1, 1, 0]
    with pytest.raises(UserError, match="lacks the pair pair-5"):  # from Python no datamodule may look at it
        AuditedWeights(str(file), soft_labels=True).weights(REWARDS, make_batch(6))


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


def test_a_floor_and_the_start():
    """Without a floor no margin rests; near 0 the force falls as DPO's at beta times weights/restraint."""
    assert min(force(SigmoidPrior(), u, 0.55) for u in range(1, 13)) > 0
    assert force(SigmoidPrior(floor=0.3), 12, 0.55) < 0
    weighting, u = SigmoidPrior(1.45, 0.8, 0.3), 1e-4
    falls = (force(weighting, u, 0.5) - force(weighting, -u, 0.5)) / (2 * u * g(weighting, 0.0))
    expected = -restraint(*torch.tensor([1.45, 0.8], dtype=torch.float64), 0.3) / 4
    assert falls == pytest.approx(float(expected), abs=1e-6)


class _Learning(Unweighted):
    every, soft_labels = 2, True


def test_options_that_make_no_sense():
    """Missing columns: test_cli.py. With objectives that correct labels themselves: test_combinations.py."""
    with pytest.raises(UserError, match=r"label_noise is 1\.0"):
        OracleWeights(1.0)
    with pytest.raises(UserError, match="_Learning has soft_labels, but learns at every 2 updates"):
        PreferenceModule(PolicyModel("nowhere"), weighting=_Learning())
