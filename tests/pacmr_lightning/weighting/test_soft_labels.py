"""The loss p l(u) + (1 - p) l(-u); test_combinations.py has its gradient, research/tests its theory."""

import pandas as pd
import pytest
import torch

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient.step_pairs import StepPairs
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.objectives import DPO, RPOEM
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import AuditedWeights, SigmoidPrior, Unweighted
from pacmr_lightning.weighting.algorithm_1 import weighted_gradient

BETA = 0.7


def test_equal_to_re_po_at_a_rate_that_stays(make_policy, make_batch):
    policy, batch = make_policy(double=True), make_batch(6)
    batch = batch.with_reference(policy.reference_log_probs(batch))
    prior = SigmoidPrior(offset="auto", soft_labels=True)
    prior.set_label_noise(0.3)
    pairs = StepPairs.of(policy, DPO(BETA), batch, 3, keep=False)
    found = weighted_gradient(pairs, prior).gradient
    loss = RPOEM(BETA, initial_rate=0.3)(Rewards.of(policy.log_probs(batch), batch, BETA)).mean()
    expected = torch.autograd.grad(loss, list(policy.adapter().values()))
    for a, b in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_hard_probabilities_of_an_audit(tmp_path, make_batch):
    file, batch, zeros = tmp_path / "pairs.parquet", make_batch(3), torch.zeros(3)
    table = {"id": batch.ids, "p_majority": [0.8, 0.5, 0.3], "observed": "chosen", "texts": ""}
    pd.DataFrame(table).to_parquet(file)
    rewards = Rewards(*[LogProbs(zeros, zeros)] * 2, 1.0)
    assert AuditedWeights(str(file), hard=True).weights(rewards, batch).g.tolist() == [1, 1, 0]
    soft = AuditedWeights(str(file), soft_labels=True)
    assert soft.weights(rewards, batch).g.tolist() == pytest.approx([0.8, 0.5, 0.3])


class _Learning(Unweighted):
    every, soft_labels = 2, True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AuditedWeights("x", mean_one=True, soft_labels=True), "soft_labels and mean_one are both"),
        (lambda: SigmoidPrior(soft_labels=True), "soft_labels needs offset above 0, but it is 0"),
        (_Learning, "_Learning has soft_labels, but learns at every 2 updates"),
    ],
)
def test_where_soft_labels_make_no_sense(make, message):
    """With objectives that correct labels themselves: test_combinations.py."""
    with pytest.raises(UserError, match=message):
        PreferenceModule(PolicyModel("nowhere"), weighting=make())
