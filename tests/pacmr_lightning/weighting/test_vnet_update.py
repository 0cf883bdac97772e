"""c_i and VNet's gradient against exact autograd in float64, through the virtual update."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch.nn.attention import SDPBackend, sdpa_kernel

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import (
    CentralDifference,
    CleanPreference,
    GhostDotProduct,
    PromptAugmentationConsistency,
    SoftPromptConsistency,
)
from pacmr_lightning.meta_gradient.step_pairs import StepPairs
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.lora_layer import PolicyLora
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import SigmoidPrior, VNetWeighting

BETA = 0.7


def with_reference(policy: PolicyModel, batch):
    return batch.with_reference(policy.reference_log_probs(batch))


def test_clipping():
    c = torch.tensor([-30.0, 0.5, 12.0])
    assert GhostDotProduct(clip=10).clipped(c).tolist() == [-10.0, 0.5, 10.0]
    assert torch.equal(CentralDifference(clip=None).clipped(c), c)


def exact_vnet_gradient(policy, weighting, train, meta, alpha, outer_loss):
    """Autograd through omega_hat(Theta) = omega - alpha/N sum_i V_i(Theta) grad l_i, with PEFT's own layers.

    The policy's LoRA weights are replaced by the (differentiable) virtual ones with functional_call.
    ``outer_loss`` maps the stopped original u and a function for the augmented or clean u to a scalar.
    """
    omega = policy.adapter()
    names, values = list(omega), list(omega.values())
    found = Rewards(policy.log_probs(train), train.reference, BETA)
    u, c = found.u.detach(), weighting.floor
    _, a, b = weighting.vnet(found.delta.detach(), u)
    if weighting.max_slope is not None:
        assert 0 < (a == weighting.vnet.max_slope).sum() < len(a)
    g = c + (1 - c) / (1 + torch.exp(-a * u - b))
    losses = g * DPO(BETA)(found)
    gradients = torch.autograd.grad(losses.sum() / len(train), values, create_graph=True)
    virtual = {n: p - alpha * q for n, p, q in zip(names, values, gradients, strict=True)}

    class LogProbsOf(torch.nn.ModuleDict):
        def forward(self, batch):
            return self["policy"].log_probs(batch)

    def u_at(batch):
        replaced = {f"policy.{n}": p for n, p in virtual.items()}
        log_probs = torch.func.functional_call(LogProbsOf({"policy": policy}), replaced, (batch,))
        return Rewards(log_probs, policy.reference_log_probs(batch), BETA).u

    outer = outer_loss(u_at(meta).detach(), lambda: u_at(meta.augmented or meta))
    return torch.autograd.grad(outer, list(weighting.vnet.parameters()))


TAU = 0.9


def hard_loss(u, view, divisor="meta"):
    """The paper's section 5.3, written out."""
    p, u = u.sigmoid(), view()
    kept = (p >= TAU) | (p <= 1 - TAU)
    assert 0 < kept.sum() < len(p)  # the threshold decides something
    losses = torch.where(p >= TAU, -F.logsigmoid(u), -F.logsigmoid(-u))
    return (kept * losses).sum() / (len(p) if divisor == "meta" else kept.sum())


OUTER = {
    "hard": (PromptAugmentationConsistency(TAU), hard_loss),
    "retained": (PromptAugmentationConsistency(TAU, "retained"), lambda *both: hard_loss(*both, "retained")),
    "soft": (
        SoftPromptConsistency(),
        lambda u, view: F.binary_cross_entropy_with_logits(view(), u.sigmoid()),
    ),
    "clean": (CleanPreference(), lambda u, view: -F.logsigmoid(view()).mean()),
}


def moved_weighting(outer, estimator, alpha, **options):
    """A double-precision VNetWeighting away from its start, where the last layer's weight is 0."""
    torch.manual_seed(11)
    weighting = VNetWeighting(outer, estimator, learning_rate=1e-3, virtual_lr=alpha, **options)
    weighting.vnet.double()
    with torch.no_grad():
        for p in weighting.vnet.parameters():
            p.add_(0.3 * torch.randn_like(p))
    if weighting.max_slope is not None:  # some of the moved slopes are above
        weighting.vnet.max_slope = -1.5
    return weighting


OPTIONS = ({}, {"floor": 0.3, "max_slope": 1.2})
ESTIMATORS = (
    (GhostDotProduct(clip=None), 1e-9, None),
    (GhostDotProduct(clip=None), 1e-9, 2),
    (CentralDifference(1e-4, relative=True, clip=None), 1e-5, None),
)
# Any two of an estimator, an outer objective and options meet.
CASES = [(*e, outer, OPTIONS[(i + j) % 2]) for i, e in enumerate(ESTIMATORS) for j, outer in enumerate(OUTER)]


@pytest.mark.parametrize(("estimator", "rtol", "micro_batch", "outer", "options"), CASES)
def test_vnet_gradient(estimator, rtol, micro_batch, outer, options, make_policy, make_batch, monkeypatch):
    """The update's gradient, times alpha (which it leaves out), is the gradient of the outer loss."""
    policy = make_policy(double=True)
    policy.train()
    train = with_reference(policy, make_batch(6))
    meta = make_batch(7, seed=5, augmented=outer != "clean")
    alpha = 0.05
    objective, outer_loss = OUTER[outer]
    weighting = moved_weighting(objective, estimator, alpha, **options)
    for batch in (meta, meta.augmented or meta):
        policy.rows(batch)  # the self-check
    # What can be differentiated twice: torch's plain kernel, PEFT's layer and whole logits.
    with sdpa_kernel(SDPBackend.MATH), monkeypatch.context() as patch:
        patch.setattr(PolicyLora, "forward", lora.Linear.forward)
        whole = lambda h, head, t, *_: head(h).log_softmax(1)[range(len(t)), t]  # noqa: E731
        patch.setattr("pacmr_lightning.policy.model.token_log_probs", whole)
        exact = exact_vnet_gradient(policy, weighting, train, meta, alpha, outer_loss)

    before = copy.deepcopy(policy.state_dict())
    pairs = StepPairs(policy, DPO(BETA), train, micro_batch)
    metrics = weighting.update(pairs, meta, 99.0, 1.0)
    scale = max(float(e.abs().max()) for e in exact)
    for parameter, expected in zip(weighting.vnet.parameters(), exact, strict=True):
        torch.testing.assert_close(alpha * parameter.grad, expected, rtol=rtol, atol=rtol * scale)
    if outer in ("hard", "retained"):
        assert 0 < metrics["meta/coverage"] < 1
    torch.testing.assert_close(policy.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in policy.parameters())


def test_a_noisy_estimator_is_reported_once(make_policy, make_batch):
    """A step of 1e-9 in fp32 is all rounding: the run says so; a sensible one stays silent."""
    policy = make_policy()
    train, meta = with_reference(policy, make_batch(6)), make_batch(7, seed=5, augmented=True)
    pairs = StepPairs(policy, DPO(BETA), train, None)
    outer = PromptAugmentationConsistency(0.55)
    noisy = VNetWeighting(outer, CentralDifference(1e-9), check_every=1)
    with pytest.warns(UserWarning, match="off the exact coefficients") as said:
        for _ in range(2):
            found = noisy.update(pairs, meta, 0.05, 0.05)
            assert found["meta/estimator_error"] > 0.5
    assert len(said) == 1 and "GhostDotProduct" in str(said[0].message)
    fine = VNetWeighting(outer, CentralDifference(1e-2, relative=True), check_every=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fine.update(pairs, meta, 0.05, 0.05)["meta/estimator_error"] < 0.02
        assert "meta/estimator_error" not in fine.update(pairs, meta, 0.05, 0.05)
        exact = VNetWeighting(outer, check_every=1).update(pairs, meta, 0.05, 0.05)
        assert "meta/estimator_error" not in exact and exact["meta/d_norm"] > 0


def test_an_error_that_cannot_be_measured(make_policy, make_batch):
    """The head sees response tokens only: VNet learns, and a line says what is missing; ghost refuses."""
    policy = make_policy(target_modules=["q_proj", "lm_head"])
    train, meta = with_reference(policy, make_batch(6)), make_batch(7, seed=5, augmented=True)
    weighting = VNetWeighting(PromptAugmentationConsistency(0.55), CentralDifference(1e-2), check_every=1)
    pairs = StepPairs(policy, DPO(BETA), train, None)
    with pytest.warns(UserWarning, match="meta/estimator_error is not measured: .* whole rows"):
        found = weighting.update(pairs, meta, 0.05, 0.05)
    assert weighting.updates == 1 and "meta/estimator_error" not in found
    with pytest.raises(UserError, match="leave lm_head and experts out of target_modules, or use Central"):
        VNetWeighting(PromptAugmentationConsistency(0.99)).update(pairs, meta, 0.05, 0.05)


def test_starts(monkeypatch):
    """logit(1 - 0.3) = log(7/3) = 0.847298. No random state is touched, nor any other process's GPU."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda *_: pytest.fail("a GPU was asked"))
    before = torch.get_rng_state()
    weighting, prior = VNetWeighting(start_slope=0.5, start_offset="auto"), SigmoidPrior(offset="auto")
    assert torch.equal(torch.get_rng_state(), before)
    for rate in (0.2, 0.3):  # of two fits
        weighting.set_label_noise(rate)
        prior.set_label_noise(rate)
    zero = LogProbs(torch.zeros(2), torch.zeros(2))
    rewards = Rewards(LogProbs(torch.tensor([2.0, -1.0]), torch.tensor([2.0, -3.0])), zero, 1.0)
    found = weighting.weights(rewards, None)
    assert torch.equal(found.a, torch.full((2,), 0.5)) and not found.g.requires_grad
    torch.testing.assert_close(found.b, torch.full((2,), 0.847298))
    torch.testing.assert_close(found.g, torch.sigmoid(torch.tensor([0.847298, 1.847298])))
    assert prior.offset == pytest.approx(0.847298, abs=1e-6)
    other = SigmoidPrior(offset="auto")
    other.load_state_dict(prior.state_dict())
    assert other.offset == prior.offset


def test_outer_objectives_refuse_each_others_pairs(make_policy, make_batch):
    policy = make_policy()
    with pytest.raises(UserError, match="remove clean_meta"):
        SoftPromptConsistency().gradient(policy, BETA, make_batch(3), None)
    with pytest.raises(UserError, match="as clean_meta"):
        CleanPreference().gradient(policy, BETA, make_batch(3, augmented=True), None)


def test_a_fresh_policy_retains_nothing_and_skips(make_policy, make_batch):
    """As an update at a learning rate of 0 does: test_same_numerics.py."""
    policy = make_policy(moved=False)
    train, meta = with_reference(policy, make_batch(4)), make_batch(4, seed=1, augmented=True)
    assert Rewards(policy.log_probs(train), train.reference, BETA).u.abs().max() == 0
    weighting = VNetWeighting()
    before = copy.deepcopy(weighting.state_dict())
    metrics = weighting.update(StepPairs(policy, DPO(BETA), train, None), meta, 0.0, 1.0)
    assert metrics["meta/coverage"] == 0 and metrics["meta/skipped_updates"] == 1
    assert weighting.skipped == 1 and weighting.updates == 0
    torch.testing.assert_close(weighting.vnet.state_dict(), before["vnet"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: PromptAugmentationConsistency(1.0), "1.0"),
        (lambda: VNetWeighting(every=0), "every is 0"),
        (lambda: VNetWeighting(learning_rate=0.0), "0.0"),
        (lambda: VNetWeighting(hidden=[]), "hidden"),
        (lambda: VNetWeighting(virtual_lr=-1.0), "-1.0"),
        (lambda: VNetWeighting(check_every=0), "check_every is 0"),
        (lambda: CentralDifference(epsilon=0.0), "epsilon"),
        (lambda: GhostDotProduct(clip=0.0), "clip"),
        (lambda: VNetWeighting(floor=1.0), "floor is 1.0"),
        (lambda: VNetWeighting(keep_gradients="no"), "no, but it must be auto, True or False"),
        (lambda: VNetWeighting(max_slope=0.5), "max_slope is 0.5, but start_slope is 1"),
    ],
)
def test_ranges(make, value):
    with pytest.raises(UserError, match=value):
        make()


def test_clean_accuracy_of_pseudo_labels(make_policy, make_batch):
    """Against a count by hand; pairs whose flip is unknown do not count, without any there is no number."""
    policy, meta = make_policy(double=True), make_batch(9, seed=5, augmented=True)
    meta.flipped[:3] = -1
    outer = PromptAugmentationConsistency(tau=0.5)
    with torch.no_grad():
        u = Rewards.of(policy.log_probs(meta), with_reference(policy, meta), BETA).u
    known = meta.flipped >= 0
    right = (u > 0) == (meta.flipped == 0)
    found = outer.gradient(policy, BETA, meta, 4).metrics
    torch.testing.assert_close(found, outer.gradient(policy, BETA, meta, None).metrics)
    assert float(found["meta/clean_accuracy"]) == pytest.approx(float(right[known].double().mean()))
    meta.flipped[:] = -1
    assert "meta/clean_accuracy" not in outer.gradient(policy, BETA, meta, 4).metrics
