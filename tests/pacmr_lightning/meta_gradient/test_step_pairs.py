"""Each pair's gradient from one pass, against a pass a pair in float64; and a step that shares them."""

import copy

import pytest
import torch

from pacmr_lightning.batch import TokenBudget
from pacmr_lightning.errors import UserError
from pacmr_lightning.gradient import norm
from pacmr_lightning.meta_gradient import CentralDifference, GhostDotProduct, PromptAugmentationConsistency
from pacmr_lightning.meta_gradient import step_pairs as module
from pacmr_lightning.meta_gradient.step_pairs import KeptStepPairs, RecomputedStepPairs, StepPairs
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import VNetWeighting
from pacmr_lightning.weighting.weighted_gradient import weighted_gradient

BETA = 0.7


@pytest.fixture
def setting(make_policy, make_batch):
    def make(name: str = "llama", **options):
        policy = make_policy(name, double=True, **options)
        batch = make_batch(6)
        return policy, batch.with_reference(policy.reference_log_probs(batch))

    return make


@pytest.fixture
def without_room(monkeypatch):
    monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(module, "SHARE", 0.0)


def alone(policy: PolicyModel, batch, i: int) -> list[torch.Tensor]:
    pair = batch[i : i + 1]
    loss = DPO(BETA)(Rewards.of(policy.log_probs(pair), pair, BETA)).sum()
    return torch.autograd.grad(loss, list(policy.adapter().values()))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"gradient_checkpointing": True}, {"layout": "separate"}, {"layout": "packed"}),
        {"layout": "packed_shared", "gradient_checkpointing": True},
    ],
)
@pytest.mark.parametrize("micro_batch_size", [None, 4, TokenBudget(50)])
def test_equal_to_a_pass_a_pair(name, options, micro_batch_size, setting):
    policy, batch = setting(name, **options)
    found = KeptStepPairs(policy, DPO(BETA), batch, micro_batch_size)
    factors = torch.linspace(-1, 2, 6, dtype=torch.float64)
    direction = {key: torch.ones_like(p) for key, p in policy.adapter().items()}
    weighted, along = found.weighted(lambda seen: factors[seen.place]), found.along(direction)
    expected = [torch.zeros_like(p) for p in policy.adapter().values()]
    for i in range(6):
        one = alone(policy, batch, i)
        assert norm(dict(enumerate(one))) > 1e-3  # something to be right about
        torch.testing.assert_close(along[i], sum(g.sum() for g in one), rtol=1e-9, atol=1e-12)
        expected = [e + factors[i] * g for e, g in zip(expected, one, strict=True)]
    for a, b in zip(weighted.values(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    truth = Rewards.of(policy.log_probs(batch), batch, BETA)
    torch.testing.assert_close(found.rewards.u, truth.u.detach())
    torch.testing.assert_close(found.losses, DPO(BETA)(truth).detach())
    assert not found.losses.requires_grad and all(p.grad is None for p in policy.parameters())
    assert not any(linear._forward_hooks for linear in policy.lora_linears().values())


@pytest.mark.parametrize("mean_one", [False, True])
@pytest.mark.parametrize("estimator", [GhostDotProduct(), CentralDifference(1e-2, relative=True)])
def test_a_shared_step_is_the_same_step(estimator, mean_one, setting, make_batch):
    policy, train = setting()
    meta = make_batch(7, seed=5, augmented=True)
    torch.manual_seed(0)
    one = VNetWeighting(PromptAugmentationConsistency(0.55), estimator, learning_rate=0.1, mean_one=mean_one)
    one.vnet.double()
    other = copy.deepcopy(one)
    keeping, running = (form(policy, DPO(BETA), train, 3) for form in (KeptStepPairs, RecomputedStepPairs))
    shared = one.update(keeping, meta, 0.05, 0.05)
    apart = other.update(running, meta, 0.05, 0.05)
    assert one.updates == other.updates == 1
    for name, value in apart.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-7, atol=1e-12)
    for a, b in zip(one.vnet.parameters(), other.vnet.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    kept, run = weighted_gradient(keeping, one), weighted_gradient(running, one)
    for name, value in run.gradient.items():
        torch.testing.assert_close(kept.gradient[name], value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(kept.weights.g, run.weights.g)
    torch.testing.assert_close(kept.mean_weight, run.mean_weight)


def test_what_is_affordable(setting, monkeypatch):
    """Six pairs' gradients against a share of the base and of what LoRA's linears get, by hand."""
    policy, batch = setting()
    policy.float()
    linears = policy.lora_linears().values()
    gradients = 6 * 4 * sum(linear.weight.numel() for linear in linears)
    tokens = batch[:2].input_ids.shape[0] * batch.input_ids.shape[1]
    base = 4 * sum(p.numel() for p in policy.parameters())
    held = base + 4 * tokens * sum(linear.in_features for linear in linears)
    monkeypatch.setattr(module, "SMALL", 0)
    for share, kept in ((gradients / held * 1.001, True), (gradients / held * 0.999, False)):
        monkeypatch.setattr(module, "SHARE", share)
        assert module._affordable(policy, batch, 2) == kept
    policy.gradient_checkpointing = True  # layers keep nothing then
    monkeypatch.setattr(module, "SHARE", gradients / base * 0.999)
    assert not module._affordable(policy, batch, 2)
    monkeypatch.setattr(module, "SMALL", gradients)
    assert module._affordable(policy, batch, 2)


def test_on_a_gpu_what_a_step_leaves_free_decides(setting, monkeypatch, without_room):
    """Not before the first step, whose peak is not known; measured once, and printed."""
    policy, batch = setting()
    policy.float()
    gradients = 6 * 4 * sum(linear.weight.numel() for linear in policy.lora_linears().values())
    monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
    free, said = [gradients / module.FREE + 1, 0], []
    monkeypatch.setattr(module, "_left_free", lambda device: free.pop(0))
    monkeypatch.setattr(module, "rank_zero_info", said.append)
    assert not module._affordable(policy, batch, 2) and len(free) == 2
    policy.has_stepped = True
    assert module._affordable(policy, batch, 2) and module._affordable(policy, batch, 2)
    assert len(said) == 1 and said[0].startswith("VNet's updates keep each pair's gradient (0.0 GiB; a step")
    policy.left_free = None  # another process, which has less
    assert not module._affordable(policy, batch, 2) and "recompute each" in said[1]


def test_layers_that_mix_rows(setting, make_batch):
    """The head sees response tokens only: nothing is kept, ghost says so, central difference goes on."""
    policy, batch = setting(target_modules=["q_proj", "lm_head"])
    pairs = StepPairs.of(policy, DPO(BETA), batch, None, often=True)
    assert isinstance(pairs, RecomputedStepPairs)
    direction = {key: torch.ones_like(p) for key, p in policy.adapter().items()}
    with pytest.raises(UserError, match="whole rows"):
        GhostDotProduct().coefficients(pairs, direction)
    central = CentralDifference(1e-4, relative=True).coefficients(pairs, direction)
    exact = [sum(g.sum() for g in alone(policy, batch, i)) for i in range(6)]
    torch.testing.assert_close(central, torch.stack(exact), rtol=1e-5, atol=1e-7)
    assert not any(linear._forward_hooks for linear in policy.lora_linears().values())
