"""Running at omega + c D equals a model whose LoRA weights were really changed."""

import copy
from unittest.mock import Mock

import pytest
import torch
from transformers import MixtralConfig

from pacmr_lightning.errors import UserError
from pacmr_lightning.policy import PolicyModel, model

from ..conftest import SHAPE


def random_direction(policy: PolicyModel, scale: float = 0.1) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {name: scale * torch.randn_like(p) for name, p in policy.adapter().items()}


def gradient(policy: PolicyModel, batch) -> list[torch.Tensor]:
    found = policy.log_probs(batch)
    return torch.autograd.grad((found.chosen - 2 * found.rejected).sum(), list(policy.adapter().values()))


@pytest.mark.parametrize("layout", ["shared", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_equal_to_a_changed_model(name, checkpointing, layout, make_policy, make_batch):
    options = {"gradient_checkpointing": checkpointing, "layout": layout}
    policy, batch = make_policy(name, double=True, **options), make_batch()
    policy.train()
    direction = random_direction(policy)
    changed = copy.deepcopy(policy)
    with torch.no_grad():
        for key, parameter in changed.adapter().items():
            parameter.add_(direction[key], alpha=-0.3)
    before, reference = {k: p.clone() for k, p in policy.adapter().items()}, policy.reference_log_probs(batch)
    with policy.shifted(direction, -0.3):
        found, found_gradient = policy.log_probs(batch), gradient(policy, batch)
        assert torch.equal(policy.reference_log_probs(batch).chosen, reference.chosen), "it does not move"
    truth = changed.log_probs(batch)
    torch.testing.assert_close(vars(found), vars(truth), atol=1e-12, rtol=0)
    torch.testing.assert_close(found_gradient, gradient(changed, batch), atol=1e-12, rtol=1e-9)
    for key, parameter in policy.adapter().items():
        assert torch.equal(parameter, before[key]) and parameter.grad is None


def test_an_exception_leaves_nothing_behind(make_policy, make_batch, monkeypatch):
    policy, batch = make_policy(), make_batch()
    direction = random_direction(policy)
    before, gradients = policy.log_probs(batch), gradient(policy, batch)
    fails = Mock(side_effect=RuntimeError("in the middle of a shifted forward"))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="middle"):
        patch.setattr(policy.model.base_model.layers[1], "forward", fails)
        with policy.shifted(direction, 1.0):
            policy.log_probs(batch)
    after = policy.log_probs(batch)
    assert torch.equal(before.chosen, after.chosen) and torch.equal(before.rejected, after.rejected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradient(policy, batch), strict=True))


def test_lora_on_experts_is_refused_by_name(save_model, make_batch, monkeypatch):
    """PEFT puts it on a tensor of all experts' weights where a model's linear layers are asked for."""
    mixtral = save_model(MixtralConfig(**SHAPE, num_local_experts=4))
    policy = PolicyModel(mixtral, rank=2, dtype="bfloat16")
    monkeypatch.setattr(model, "rank_zero_info", (said := []).append)
    policy.build()
    assert said[0].startswith("LoRA on experts' parameters computes in float32; lora_compute_dtype")
    assert torch.isfinite(policy.log_probs(make_batch(1)).chosen).all()
    with pytest.raises(UserError, match=r"layers\.0\.mlp\S* .*\[k_proj, o_proj, q_proj, v_proj\]"):
        policy.shifted(random_direction(policy), 1.0).__enter__()
    plain = PolicyModel(mixtral, rank=2, target_modules=["k_proj", "o_proj", "q_proj", "v_proj"])
    plain.build()
    with plain.shifted(random_direction(plain), 1.0):
        assert torch.isfinite(plain.log_probs(make_batch(1)).chosen).all()
