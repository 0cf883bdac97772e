"""c_i and VNet's gradient against exact autograd in float64, through the virtual update."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pacmr_lightning.batch import LogProbs, PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import (
    CentralDifference,
    GhostDotProduct,
    PromptAugmentationConsistency,
    VNetWeighting,
)
from pacmr_lightning.weighting.hypergradient import ghost_hooks

BETA = 0.7


def exact_coefficients(policy: PolicyModel, batch, direction) -> torch.Tensor:
    """d . grad l_i with one backward a pair."""
    values = []
    for i in range(len(batch)):
        pair = batch[i : i + 1]
        loss = DPO(BETA)(Rewards(policy.log_probs(pair), pair.reference, BETA)).sum()
        gradients = torch.autograd.grad(loss, list(policy.adapter().values()))
        values.append(sum((g * d).sum() for g, d in zip(gradients, direction.values(), strict=True)))
    return torch.stack(values)


def with_reference(policy: PolicyModel, batch):
    return batch.with_reference(policy.reference_log_probs(batch))


@pytest.fixture
def setting(make_policy, make_batch):
    """A policy away from its reference, train pairs, and a direction of the size that d_meta has."""

    def make(name: str = "llama", **options):
        policy = make_policy(name, double=True, **options)
        policy.train()
        batch = with_reference(policy, make_batch(6))
        torch.manual_seed(3)
        direction = {k: 0.1 * torch.randn_like(p) for k, p in policy.adapter().items()}
        return policy, batch, direction

    return make


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"layout": "separate"}])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_ghost_is_exact(name, options, micro_batch_size, setting):
    policy, batch, direction = setting(name, **options)
    exact = exact_coefficients(policy, batch, direction)
    found = GhostDotProduct().coefficients(policy, DPO(BETA), batch, direction, micro_batch_size)
    assert exact.abs().min() > 1e-4  # something to be right about
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in policy.parameters())
    assert not any(linear._forward_hooks for linear in policy.lora_linears().values())


def test_ghost_with_reentrant_checkpointing(setting):
    """Its repeated forward is the one with gradients: each layer must count once."""
    policy, batch, direction = setting(gradient_checkpointing=True)
    exact = exact_coefficients(policy, batch, direction)
    policy.model.gradient_checkpointing_enable({"use_reentrant": True})
    policy.model.enable_input_require_grads()
    with ghost_hooks(policy, direction) as dots:
        DPO(BETA)(Rewards(policy.log_probs(batch), batch.reference, BETA)).sum().backward()
    assert len(dots) == len(policy.lora_linears())
    torch.testing.assert_close(torch.stack(dots).sum(0), exact, rtol=1e-9, atol=1e-12)


def test_central_difference(setting):
    """Scale-free to 1e-5; the error of a raw step falls with its square."""
    policy, batch, direction = setting()
    exact = exact_coefficients(policy, batch, direction)
    relative = CentralDifference(epsilon=1e-4, relative=True)
    found = relative.coefficients(policy, DPO(BETA), batch, direction, 2)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-8)
    longer = {k: 1000 * d for k, d in direction.items()}
    scaled = relative.coefficients(policy, DPO(BETA), batch, longer, None)
    torch.testing.assert_close(scaled / 1000, found, rtol=1e-9, atol=1e-12)
    errors = [
        (CentralDifference(epsilon).coefficients(policy, DPO(BETA), batch, direction, None) - exact).norm()
        for epsilon in (4e-3, 2e-3, 1e-3)
    ]
    assert 3.5 < errors[0] / errors[1] < 4.5 and 3.5 < errors[1] / errors[2] < 4.5


def test_clipping():
    c = torch.tensor([-30.0, 0.5, 12.0])
    assert GhostDotProduct(clip=10).clipped(c).tolist() == [-10.0, 0.5, 10.0]
    assert torch.equal(CentralDifference(clip=None).clipped(c), c)


def exact_vnet_gradient(policy, weighting, train, meta, alpha, tau):
    """Autograd through omega_hat(Theta) = omega - alpha/N sum_i V_i(Theta) grad l_i, on a copy of the policy.

    The copy's LoRA weights are replaced by the (differentiable) virtual ones with functional_call; the
    pseudo-labels are stopped, the loss is written out as in the paper.
    """
    omega = policy.adapter()
    names, values = list(omega), list(omega.values())
    found = Rewards(policy.log_probs(train), train.reference, BETA)
    g, _, _ = weighting.vnet(found.delta.detach(), found.u.detach())
    loss = (g * DPO(BETA)(found)).sum() / len(train)
    gradients = torch.autograd.grad(loss, values, create_graph=True)
    virtual = {n: p - alpha * q for n, p, q in zip(names, values, gradients, strict=True)}

    class LogProbsOf(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.policy = policy

        def forward(self, batch):
            return self.policy.log_probs(batch)

    def u_at(parameters, batch):
        replaced = {f"policy.{n}": p for n, p in parameters.items()}
        log_probs = torch.func.functional_call(LogProbsOf(), replaced, (batch,))
        return Rewards(log_probs, policy.reference_log_probs(batch), BETA).u

    with torch.no_grad():
        p = u_at(virtual, meta).sigmoid()
    u = u_at(virtual, meta.augmented)
    outer = torch.where(p >= tau, -F.logsigmoid(u), torch.where(p <= 1 - tau, -F.logsigmoid(-u), 0 * u))
    retained = ((p >= tau) | (p <= 1 - tau)).sum()
    assert 0 < retained < len(meta)  # the threshold decides something
    return torch.autograd.grad(outer.sum() / len(meta), list(weighting.vnet.parameters()))


@pytest.mark.parametrize("micro_batch_size", [None, 2, 3])
@pytest.mark.parametrize(
    ("estimator", "rtol"),
    [(GhostDotProduct(clip=None), 1e-9), (CentralDifference(1e-4, relative=True, clip=None), 1e-5)],
)
def test_vnet_gradient(estimator, rtol, micro_batch_size, make_policy, make_batch, monkeypatch):
    """The update's gradient, times alpha (which it leaves out), is the gradient of the outer loss."""
    # Checkpointed logits cannot be differentiated twice; the exact gradient needs that.
    monkeypatch.setattr("pacmr_lightning.logprobs.checkpoint", lambda f, *args, **options: f(*args))
    policy = make_policy(double=True)
    policy.train()
    train, meta = with_reference(policy, make_batch(6)), make_batch(7, seed=5, augmented=True)
    tau, alpha = 0.9, 0.05
    torch.manual_seed(11)
    weighting = VNetWeighting(
        PromptAugmentationConsistency(tau), estimator, learning_rate=1e-3, virtual_lr=alpha
    )
    weighting.vnet.double()
    with torch.no_grad():  # away from the start, where the last layer's weight is 0
        for p in weighting.vnet.parameters():
            p.add_(0.3 * torch.randn_like(p))
    with sdpa_kernel(SDPBackend.MATH):  # the one that can be differentiated twice
        exact = exact_vnet_gradient(policy, weighting, train, meta, alpha, tau)

    before = copy.deepcopy(policy.state_dict())
    caught = {}
    step = weighting.vnet_optimizer.step
    monkeypatch.setattr(
        weighting.vnet_optimizer,
        "step",
        lambda: (caught.update(enumerate(p.grad.clone() for p in weighting.vnet.parameters())), step()),
    )
    metrics = weighting.update(
        policy, DPO(BETA), train, meta, learning_rate=99.0, micro_batch_size=micro_batch_size
    )
    scale = max(float(e.abs().max()) for e in exact)
    for i, expected in enumerate(exact):
        torch.testing.assert_close(alpha * caught[i], expected, rtol=rtol, atol=rtol * scale)
    assert 0 < metrics["meta/coverage"] < 1
    for key, value in policy.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(p.grad is None for p in policy.parameters())


def test_alpha_defaults_to_the_learning_rate(make_policy, make_batch):
    policy = make_policy(double=True)
    train, meta = with_reference(policy, make_batch(6)), make_batch(7, seed=5, augmented=True)
    states = []
    for virtual_lr, learning_rate in ((0.05, 9.0), (None, 0.05), (None, 0.5)):
        torch.manual_seed(0)
        weighting = VNetWeighting(PromptAugmentationConsistency(0.55), virtual_lr=virtual_lr)
        weighting.update(policy, DPO(BETA), train, meta, learning_rate=learning_rate, micro_batch_size=None)
        states.append(weighting.vnet_optimizer.state_dict()["state"][4]["exp_avg"])
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_pseudo_labels_are_stopped_and_ignore_observed_order(make_policy, make_batch):
    """Exchanging the responses of every meta pair, in both views, changes neither loss nor direction."""
    policy = make_policy(double=True)
    meta = make_batch(6, augmented=True)

    def exchanged(batch):
        def part(segment):
            rows = zip(batch.input_ids, batch.segment_ids, strict=True)
            return [tokens[segments == segment].tolist() for tokens, segments in rows]

        return PairBatch.collate(batch.ids, part(1), part(3), part(2))

    other = exchanged(meta)
    other.augmented = exchanged(meta.augmented)
    outer = PromptAugmentationConsistency(0.6)
    a, b = (outer.gradient(policy, BETA, m, 4) for m in (meta, other))
    assert a.retained == b.retained > 0
    torch.testing.assert_close(a.metrics["meta/loss"], b.metrics["meta/loss"])
    for name in a.direction:
        torch.testing.assert_close(a.direction[name], b.direction[name])


def test_a_fresh_policy_retains_nothing_and_skips(make_policy, make_batch):
    policy = make_policy(moved=False)
    train, meta = with_reference(policy, make_batch(4)), make_batch(4, seed=1, augmented=True)
    assert Rewards(policy.log_probs(train), train.reference, BETA).u.abs().max() == 0
    weighting = VNetWeighting()
    before = copy.deepcopy(weighting.state_dict())
    metrics = weighting.update(policy, DPO(BETA), train, meta, learning_rate=0.0, micro_batch_size=None)
    assert metrics["meta/coverage"] == 0 and metrics["meta/skipped_updates"] == 1
    assert weighting.skipped == 1 and weighting.updates == 0
    for key, value in before["vnet"].items():
        assert torch.equal(value, weighting.vnet.state_dict()[key])


def test_start_of_vnet(make_policy):
    weighting = VNetWeighting()
    u, delta = torch.linspace(-9, 9, 7), torch.linspace(4, -4, 7)
    rewards = _rewards(u, delta)
    found = weighting.weights(rewards, None)
    assert torch.equal(found.a, torch.ones(7)) and torch.equal(found.b, torch.zeros(7))
    torch.testing.assert_close(found.g, torch.sigmoid(u))
    assert not found.g.requires_grad


def _rewards(u: torch.Tensor, delta: torch.Tensor) -> Rewards:
    zero = LogProbs(torch.zeros_like(u), torch.zeros_like(u))
    return Rewards(LogProbs((delta + u) / 2, (delta - u) / 2), zero, 1.0)


def test_state_dict_round_trip(make_policy, make_batch):
    policy = make_policy()
    train, meta = with_reference(policy, make_batch(6)), make_batch(7, seed=5, augmented=True)
    step = {"learning_rate": 0.05, "micro_batch_size": None}
    one = VNetWeighting(PromptAugmentationConsistency(0.55))
    one.update(policy, DPO(BETA), train, meta, **step)
    other = VNetWeighting(PromptAugmentationConsistency(0.55))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for weighting in (one, other):
        weighting.update(policy, DPO(BETA), train, meta, **step)
    assert one.updates == other.updates == 2
    for a, b in zip(one.vnet.parameters(), other.vnet.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: PromptAugmentationConsistency(0.49), "0.49"),
        (lambda: PromptAugmentationConsistency(1.0), "1.0"),
        (lambda: PromptAugmentationConsistency(math.nan), "nan"),
        (lambda: VNetWeighting(every=0), "every is 0"),
        (lambda: VNetWeighting(learning_rate=0.0), "0.0"),
        (lambda: VNetWeighting(hidden=[]), "hidden"),
        (lambda: VNetWeighting(virtual_lr=-1.0), "-1.0"),
        (lambda: CentralDifference(epsilon=0.0), "epsilon"),
        (lambda: GhostDotProduct(clip=0.0), "clip"),
        (lambda: DPO(beta=0.0), "beta is 0.0"),
        (lambda: DPO(beta=math.nan), "beta is nan"),
    ],
)
def test_ranges(make, value):
    with pytest.raises(UserError, match=value):
        make()
