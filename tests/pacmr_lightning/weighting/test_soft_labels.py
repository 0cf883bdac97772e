"""The loss p l(u) + (1 - p) l(-u): its gradient, and what it is equal to; research/tests has its theory."""

import pandas as pd
import pytest
import torch

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient.step_pairs import KeptStepPairs, RecomputedStepPairs, StepPairs
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.objectives import CDPO, DPO, IPO, RDPO, RPOEM
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import AuditedWeights, SigmoidPrior, VNetWeighting, Weights
from pacmr_lightning.weighting.algorithm_1 import weighted_gradient

BETA = 0.7


class Told(SigmoidPrior):
    def __init__(self, p, soft_labels=True):
        super().__init__(offset=1.0, soft_labels=soft_labels)
        self.p = p

    def weights(self, rewards, batch):
        return Weights(torch.stack([self.p[int(name.rpartition("-")[2])] for name in batch.ids]))


@pytest.fixture
def setting(make_policy, make_batch):
    policy = make_policy(double=True)
    batch = make_batch(6)
    batch.ids = [f"pair-{i}" for i in range(6)]
    return policy, batch.with_reference(policy.reference_log_probs(batch))


@pytest.mark.parametrize(("form", "micro_batch_size", "checkpointing"), [
    (KeptStepPairs, None, False), (KeptStepPairs, 4, True), (RecomputedStepPairs, None, True),
    (RecomputedStepPairs, 4, False),
])  # fmt: skip
@pytest.mark.parametrize("objective", [DPO(BETA, sft_weight=0.5), IPO(BETA, length_normalize=True)])
def test_gradient_of_a_step(form, micro_batch_size, checkpointing, objective, setting):
    """Against autograd of the loss as it is written, with the pairs exchanged by hand."""
    policy, batch = setting
    policy.gradient_checkpointing = checkpointing
    p = torch.tensor([0.9, 0.0, 1.0, 0.5, 0.3, 0.71], dtype=torch.float64)
    pairs = form(policy, objective, batch, micro_batch_size, soft_labels=True)
    found = weighted_gradient(pairs, Told(p))
    rewards = Rewards.of(policy.log_probs(batch), batch, BETA)
    sides = (LogProbs(one.rejected, one.chosen) for one in (rewards.policy, rewards.reference))
    other = Rewards(*sides, BETA, rewards.rejected_tokens, rewards.chosen_tokens)
    loss = (p * objective(rewards) + (1 - p) * objective(other)).mean()
    expected = torch.autograd.grad(loss, list(policy.adapter().values()))
    torch.testing.assert_close([*found.gradient.values()], [*expected], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.weights.g, p)
    torch.testing.assert_close(found.losses, objective(rewards).detach())
    torch.testing.assert_close(pairs.weighted_losses(), (objective(rewards) - objective(other)).detach())


def test_equal_to_re_po_at_a_rate_that_stays(setting):
    policy, batch = setting
    prior = SigmoidPrior(offset="auto", soft_labels=True)
    prior.set_label_noise(0.3)
    pairs = StepPairs.of(policy, DPO(BETA), batch, 3, keep=False, soft_labels=True)
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


@pytest.mark.parametrize(
    ("make", "objective", "message"),
    [
        (lambda: Told(torch.ones(1)), RDPO(label_noise=0.2), "RDPO models label noise itself"),
        (lambda: Told(torch.ones(1)), CDPO(label_noise=0.2), "use DPO or IPO, or set soft_labels to false"),
        (lambda: Told(torch.ones(1)), RPOEM(), "RPOEM models label noise itself"),
        (lambda: AuditedWeights("x", mean_one=True, soft_labels=True), DPO(), "soft_labels and mean_one are"),
        (lambda: SigmoidPrior(soft_labels=True), DPO(), "soft_labels needs offset above 0, but it is 0"),
        (lambda: VNetWeighting(soft_labels=True), DPO(), "soft_labels needs start_offset above 0, but it is"),
    ],
)
def test_where_soft_labels_make_no_sense(make, objective, message):
    with pytest.raises(UserError, match=message):
        PreferenceModule(PolicyModel("nowhere"), objective, make())
