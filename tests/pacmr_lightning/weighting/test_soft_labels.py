"""The loss p l(u) + (1 - p) l(-u): its gradient, where its minimum is, and what it is equal to."""

import math

import pandas as pd
import pytest
import torch

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient.step_pairs import KeptStepPairs, RecomputedStepPairs, StepPairs
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.objectives import CDPO, DPO, IPO, R3M, RDPO, ROPO, RPOEM, HolderDPO
from pacmr_lightning.objectives.soft_labels import SoftLabelDifference
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import AuditedWeights, SigmoidPrior, VNetWeighting, Weights
from pacmr_lightning.weighting.weighted_gradient import weighted_gradient

BETA = 0.7


class Told(SigmoidPrior):
    def __init__(self, p, soft_labels=True):
        super().__init__(offset=1.0, soft_labels=soft_labels)
        self.p = p

    def weights(self, rewards, batch):
        return Weights(torch.stack([self.p[int(name.rpartition("-")[2])] for name in batch.ids]))


def rewards_of(u: torch.Tensor) -> Rewards:
    zeros = torch.zeros_like(u)
    return Rewards(LogProbs(u / 2, -u / 2), LogProbs(zeros, zeros), 1.0)


@pytest.fixture
def setting(make_policy, make_batch):
    policy = make_policy(double=True)
    batch = make_batch(6)
    batch.ids = [f"pair-{i}" for i in range(6)]
    return policy, batch.with_reference(policy.reference_log_probs(batch))


@pytest.mark.parametrize("form", [KeptStepPairs, RecomputedStepPairs])
@pytest.mark.parametrize("micro_batch_size", [None, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("objective", [DPO(BETA), IPO(BETA), IPO(BETA, length_normalize=True), R3M(BETA)])
def test_gradient_of_a_step(form, micro_batch_size, checkpointing, objective, setting):
    """Against autograd of the loss as it is written, with the pairs exchanged by hand."""
    policy, batch = setting
    policy.gradient_checkpointing = checkpointing
    p = torch.tensor([0.9, 0.0, 1.0, 0.5, 0.3, 0.71], dtype=torch.float64)
    pairs = form(policy, SoftLabelDifference(objective), batch, micro_batch_size)
    found = weighted_gradient(pairs, Told(p))
    rewards = Rewards.of(policy.log_probs(batch), batch, BETA)
    sides = (LogProbs(one.rejected, one.chosen) for one in (rewards.policy, rewards.reference))
    other = Rewards(*sides, BETA, rewards.rejected_tokens, rewards.chosen_tokens)
    loss = (p * objective(rewards) + (1 - p) * objective(other)).mean()
    expected = torch.autograd.grad(loss, list(policy.adapter().values()))
    torch.testing.assert_close([*found.gradient.values()], [*expected], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.weights.g, p)
    torch.testing.assert_close(pairs.losses, (objective(rewards) - objective(other)).detach())


def minimum(loss) -> torch.Tensor:
    """u at which the sum of the losses of K problems is smallest, by L-BFGS in float64."""
    u = torch.zeros(len(S), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([u], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-14)

    def closure():
        optimizer.zero_grad()
        value = loss(u).sum()
        value.backward()
        return value

    optimizer.step(closure)
    return u.detach()


S = torch.linspace(-2.5, 2.5, 11, dtype=torch.float64)
"""logit(eta) of the first of two outcomes."""


def two_outcomes(u, q, first, second, objective=None):
    """The paper's section 3: the first outcome is observed with probability q, its label has probability
    ``first``; the second with 1 - q, its own has ``second``. The loss over both, with soft labels."""
    difference = SoftLabelDifference(objective or DPO(1.0))
    both = (q, rewards_of(u), first), (1 - q, rewards_of(-u), second)
    return sum(share * (difference.rest(r) + p * difference(r)) for share, r, p in both)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.4])
def test_the_posterior_recovers_the_clean_preference(rate):
    """With p = P(the label is right | label) the minimum is u = logit(eta): what clean labels would teach."""
    q = (1 - rate) * S.sigmoid() + rate * (-S).sigmoid()
    first, second = (1 - rate) * S.sigmoid() / q, (1 - rate) * (-S).sigmoid() / (1 - q)
    found = minimum(lambda u: two_outcomes(u, q, first, second))
    torch.testing.assert_close(found, S, rtol=0, atol=1e-6)
    # DPO learns the noisy preference instead.
    ones = torch.ones_like(S)
    torch.testing.assert_close(
        minimum(lambda u: two_outcomes(u, q, ones, ones)), q.logit(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    "objective", [IPO(1.0), R3M(1.0), ROPO(1.0), HolderDPO(1.0)], ids=lambda o: type(o).__name__
)
def test_the_posterior_has_the_risk_of_clean_labels(objective):
    """Whatever the objective, and at any u."""
    rate, eta, u = 0.3, S.sigmoid(), torch.linspace(-4, 4, 11, dtype=torch.float64)
    q = (1 - rate) * eta + rate * (1 - eta)
    p = (1 - rate) * eta / q, (1 - rate) * (1 - eta) / (1 - q)
    clean = eta * objective(rewards_of(u)) + (1 - eta) * objective(rewards_of(-u))
    torch.testing.assert_close(two_outcomes(u, q, *p, objective), clean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("told", [0.2, 0.45])
def test_a_rate_that_is_told_wrongly(told):
    """At the minimum sigmoid(u) = q g+ + (1 - q)(1 - g-) whatever the probabilities are.

    Too low a rate leaves u nearer to what DPO learns, too high a one takes it beyond the truth; the sign
    stays.
    """
    rate = 0.3
    q = (1 - rate) * S.sigmoid() + rate * (-S).sigmoid()
    offset = math.log((1 - told) / told)
    first, second = (S + offset).sigmoid(), (offset - S).sigmoid()
    found = minimum(lambda u: two_outcomes(u, q, first, second))
    expected = (q * first + (1 - q) * (1 - second)).logit()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    ahead = S > 0
    assert (found[ahead] > q.logit()[ahead]).all() and (found.sign() == S.sign()).all()
    assert (found[ahead] < S[ahead]).all() == (told < rate)


@pytest.mark.parametrize("rate", [0.2, 0.4])
def test_where_weights_of_the_running_policy_come_to_rest(rate):
    """Weights g = sigmoid(u + logit(1 - rate)) of the policy's own u, as VNet gives them, as soft labels.

    A policy that follows the gradient ends at the clean preference; with another rate it ends elsewhere.
    """
    q = (1 - rate) * S.sigmoid() + rate * (-S).sigmoid()

    def rest(told):
        u = q.logit().clone()
        offset = math.log((1 - told) / told)
        for _ in range(20_000):
            first, second = (u + offset).sigmoid(), (offset - u).sigmoid()
            u += q * first + (1 - q) * (1 - second) - u.sigmoid()  # minus the gradient, weights held
        return u

    torch.testing.assert_close(rest(rate), S, rtol=0, atol=1e-6)
    ahead = S > 0
    assert (rest(rate / 2)[ahead] < S[ahead] - 0.01).all()


def test_equal_to_re_po_at_a_rate_that_stays(setting):
    policy, batch = setting
    prior = SigmoidPrior(offset="auto", soft_labels=True)
    prior.set_label_noise(0.3)
    pairs = StepPairs.of(policy, DPO(BETA), batch, 3, often=False, soft_labels=True)
    found = weighted_gradient(pairs, prior).gradient
    loss = RPOEM(BETA, initial_rate=0.3)(Rewards.of(policy.log_probs(batch), batch, BETA)).mean()
    expected = torch.autograd.grad(loss, list(policy.adapter().values()))
    for a, b in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_hard_probabilities_of_an_audit(tmp_path, make_batch):
    file = tmp_path / "pairs.parquet"
    batch = make_batch(3)
    pd.DataFrame({"id": batch.ids, "p_wrong": [0.2, 0.5, 0.7], "observed": "chosen"}).to_parquet(file)
    rewards = rewards_of(torch.zeros(3))
    assert AuditedWeights(str(file), hard=True).weights(rewards, batch).g.tolist() == [1, 1, 0]
    soft = AuditedWeights(str(file), soft_labels=True)
    assert soft.weights(rewards, batch).g.tolist() == pytest.approx([0.8, 0.5, 0.3])


@pytest.mark.parametrize(
    ("make", "objective", "message"),
    [
        (lambda: Told(torch.ones(1)), RDPO(label_noise=0.2), "RDPO holds labels wrong with some probability"),
        (lambda: Told(torch.ones(1)), CDPO(label_noise=0.2), "use DPO or IPO, or set soft_labels to false"),
        (lambda: Told(torch.ones(1)), RPOEM(), "RPOEM holds labels wrong"),
        (lambda: AuditedWeights("x", mean_one=True, soft_labels=True), DPO(), "soft_labels and mean_one are"),
        (lambda: SigmoidPrior(soft_labels=True), DPO(), "soft_labels needs offset above 0, but it is 0"),
        (lambda: VNetWeighting(soft_labels=True), DPO(), "soft_labels needs start_offset above 0, but it is"),
    ],
)
def test_where_soft_labels_make_no_sense(make, objective, message):
    with pytest.raises(UserError, match=message):
        PreferenceModule(PolicyModel("nowhere"), objective, make())
