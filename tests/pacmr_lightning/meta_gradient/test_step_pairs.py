"""Each pair's gradient from one pass, against a pass a pair in float64; what keeps them; clipped sums.

test_same_numerics.py has whole updates, with gradients that are kept and that are not.
"""

import pytest
import torch

from pacmr_lightning.batch import TokenBudget
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import CentralDifference, GhostDotProduct
from pacmr_lightning.meta_gradient.step_pairs import StepPairs
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel, memory
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import Unweighted, VNetWeighting
from pacmr_lightning.weighting.algorithm_1 import weighted_gradient

BETA = 0.7


@pytest.fixture
def setting(make_policy, make_batch):
    def make(name: str = "llama", **options):
        policy = make_policy(name, double=True, **options)
        batch = make_batch(6)
        return policy, batch.with_reference(policy.reference_log_probs(batch))

    return make


def alone(policy: PolicyModel, batch, i: int) -> list[torch.Tensor]:
    pair = batch[i : i + 1]
    loss = DPO(BETA)(Rewards.of(policy.log_probs(pair), pair, BETA)).sum()
    return torch.autograd.grad(loss, list(policy.adapter().values()))


OPTIONS = (
    *({}, {"gradient_checkpointing": True}, {"layout": "separate"}),
    {"layout": "packed", "gradient_checkpointing": True},
)
FORMS = (
    *((True, n) for n in (None, 4, TokenBudget(50))),
    *((False, n) for n in (None, 2)),
)
# Any two of a model, options and a form meet.
CASES = [
    (("llama", "gpt2", "mistral")[(i + j) % 3], options, *form)
    for i, options in enumerate(OPTIONS)
    for j, form in enumerate(FORMS)
]


@pytest.mark.parametrize(("name", "options", "keep", "micro_batch_size"), CASES)
def test_equal_to_a_pass_a_pair(name, options, keep, micro_batch_size, setting):
    policy, batch = setting(name, **options)
    found = StepPairs(policy, DPO(BETA), batch, micro_batch_size, keep)
    factors = torch.linspace(-1, 2, 6, dtype=torch.float64)
    direction = {key: torch.ones_like(p) for key, p in policy.adapter().items()}
    weighted, along = policy.zeros(), found.along(direction)
    sizes = [len(part) for part, _ in found.parts]
    for part, some in zip(found, factors.split(sizes), strict=True):
        found.add_gradient(weighted, part, some)
    expected = [torch.zeros_like(p) for p in policy.adapter().values()]
    for i in range(6):
        one = alone(policy, batch, i)
        assert torch.nn.utils.get_total_norm(one) > 1e-3  # something to be right about
        torch.testing.assert_close(along[i], sum(g.sum() for g in one), rtol=1e-9, atol=1e-12)
        expected = [e + factors[i] * g for e, g in zip(expected, one, strict=True)]
    torch.testing.assert_close([*weighted.values()], expected, rtol=1e-9, atol=1e-12)
    truth = Rewards.of(policy.log_probs(batch), batch, BETA)
    inner = weighted_gradient(found, Unweighted())
    torch.testing.assert_close(inner.rewards.u, truth.u.detach())
    torch.testing.assert_close(inner.losses, DPO(BETA)(truth).detach())
    assert not inner.losses.requires_grad and all(p.grad is None for p in policy.parameters())
    assert all(layer.per_pair is layer.shift is None for layer in policy.lora_layers().values())


def test_central_difference(setting):
    """Scale-free to 1e-5; the error of a raw step falls with its square."""
    policy, batch = setting()
    torch.manual_seed(3)
    direction = {key: 0.1 * torch.randn_like(p) for key, p in policy.adapter().items()}
    pairs = StepPairs(policy, DPO(BETA), batch, 2)
    exact = pairs.along(direction)
    relative = CentralDifference(epsilon=1e-4, relative=True)
    found = relative.coefficients(pairs, direction)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-8)
    scaled = relative.coefficients(pairs, {key: 1000 * d for key, d in direction.items()})
    torch.testing.assert_close(scaled / 1000, found, rtol=1e-9, atol=1e-12)
    raw = [CentralDifference(epsilon).coefficients(pairs, direction) for epsilon in (4e-3, 2e-3, 1e-3)]
    errors = [(c - exact).norm() for c in raw]
    assert 3.5 < errors[0] / errors[1] < 4.5 and 3.5 < errors[1] / errors[2] < 4.5


@pytest.fixture
def large(setting, monkeypatch):
    """A policy, a batch whose kept gradients count as large, their bytes by hand, and what is printed."""
    policy, batch = setting()
    monkeypatch.setattr(memory, "SMALL", 0)
    said = []
    monkeypatch.setattr(memory, "rank_zero_info", said.append)
    return policy, batch, 6 * 4 * sum(w.numel() for w in policy.adapter().values()), said


def kept(policy, batch, keep="auto") -> bool:
    return StepPairs(policy, DPO(BETA), batch, 2, keep).kept is not None


def test_on_a_cpu_its_ram_decides(large, monkeypatch):
    """An eighth, once and for all; processes that train together share it, and the one with least decides."""
    policy, batch, gradients, said = large
    for ram, expected in ((8 * gradients, True), (8 * gradients - 8, False)):
        policy.gradient_memory.limit = None
        monkeypatch.setattr(memory, "ram", lambda ram=ram: ram)
        assert kept(policy, batch) is expected
        monkeypatch.setattr(memory, "ram", lambda: 0)
        assert kept(policy, batch) is expected
    overruled = "overrule it by --model.weighting.keep_gradients"
    assert said[0].startswith("keep_gradients auto is true: ") and said[0].endswith(f"{overruled} false.")
    assert said[1].startswith("keep_gradients auto is false: ") and said[1].endswith(f"{overruled} true.")
    for name, of in (("ranks", lambda: 2), ("min_over_ranks", lambda value, device: value - 8)):
        policy.gradient_memory.limit = None
        with monkeypatch.context() as patch:
            patch.setattr(memory, "ram", lambda: 8 * gradients)
            patch.setattr(memory, name, of)
            assert not kept(policy, batch)
    monkeypatch.setattr(memory, "SMALL", gradients)
    assert kept(policy, batch) and len(said) == 4


def test_on_a_gpu_what_a_step_leaves_free_decides(large, monkeypatch):
    """Not before the first step, whose peak is not known; measured once, and printed."""
    policy, _, gradients, said = large
    monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
    # 100 of the process's 250 are in use at most.
    numbers = {"mem_get_info": (gradients, 0), "memory_reserved": 250, "max_memory_allocated": 100}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert not policy.keeps_gradients(6) and not said and policy.gradient_memory.limit is None
    policy.gradient_memory.has_stepped = True
    assert not policy.keeps_gradients(6)
    assert policy.gradient_memory.limit == int(memory.FREE * (gradients + 150))
    policy.gradient_memory.limit = None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gradients / memory.FREE, 0))
    assert policy.keeps_gradients(6) and policy.keeps_gradients(6)
    assert ["80% of what the largest step so far leaves free" in one for one in said] == [True, True]


def test_what_was_asked_for_is_done(large, monkeypatch):
    policy, batch, _, said = large
    monkeypatch.setattr(memory, "ram", lambda: 0)
    assert kept(policy, batch, True) and not kept(policy, batch, False) and not said
    with pytest.raises(UserError, match="keep_gradients is true, but ZeRO-3"):
        VNetWeighting(keep_gradients=True).check_sharded()


def test_layers_that_mix_rows(setting, make_batch):
    """The head sees response tokens only: nothing is kept, ghost says so, central difference goes on."""
    policy, batch = setting(target_modules=["q_proj", "lm_head"])
    pairs = StepPairs(policy, DPO(BETA), batch, None, keep="auto")
    assert pairs.kept is None
    with pytest.raises(UserError, match="whole rows"):
        StepPairs(policy, DPO(BETA), batch, None, keep=True)
    direction = {key: torch.ones_like(p) for key, p in policy.adapter().items()}
    with pytest.raises(UserError, match="whole rows"):
        GhostDotProduct().coefficients(pairs, direction)
    central = CentralDifference(1e-4, relative=True).coefficients(pairs, direction)
    exact = [sum(g.sum() for g in alone(policy, batch, i)) for i in range(6)]
    torch.testing.assert_close(central, torch.stack(exact), rtol=1e-5, atol=1e-7)
