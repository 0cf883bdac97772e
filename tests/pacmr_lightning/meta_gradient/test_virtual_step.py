"""Running at omega + c D, by hooks or swapped data, equals a model whose LoRA weights were really changed."""

import contextlib
import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import virtual_step
from pacmr_lightning.meta_gradient.virtual_step import check_shifted, hooked, shifted, swapped
from pacmr_lightning.policy import PolicyModel

from ..conftest import SHAPE


def random_direction(policy: PolicyModel, scale: float = 0.1) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {name: scale * torch.randn_like(p) for name, p in policy.adapter().items()}


def gradient(policy: PolicyModel, batch) -> list[torch.Tensor]:
    found = policy.log_probs(batch)
    return torch.autograd.grad((found.chosen - 2 * found.rejected).sum(), list(policy.adapter().values()))


@pytest.mark.parametrize("way", [hooked, swapped])
@pytest.mark.parametrize("layout", ["shared", "packed_shared"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_equal_to_a_changed_model(name, checkpointing, layout, way, make_policy, make_batch):
    options = {"gradient_checkpointing": checkpointing, "layout": layout}
    policy, batch = make_policy(name, double=True, **options), make_batch()
    policy.train()
    direction = random_direction(policy)
    changed = copy.deepcopy(policy)
    with torch.no_grad():
        for key, parameter in changed.adapter().items():
            parameter.add_(direction[key], alpha=-0.3)
    before = {k: p.clone() for k, p in policy.adapter().items()}
    with way(policy, direction, -0.3):
        found, found_gradient = policy.log_probs(batch), gradient(policy, batch)
    truth = changed.log_probs(batch)
    torch.testing.assert_close(found.chosen, truth.chosen, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.rejected, truth.rejected, atol=1e-12, rtol=0)
    for a, b in zip(found_gradient, gradient(changed, batch), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)
    for key, parameter in policy.adapter().items():
        assert torch.equal(parameter, before[key]) and parameter.grad is None


@pytest.mark.parametrize(
    ("options", "sharded", "way"),
    [({}, False, swapped), ({}, True, hooked), ({"dtype": "bfloat16"}, False, hooked)],
)
def test_hooks_where_parameters_are_parts_or_products_are_coarse(
    options, sharded, way, make_policy, monkeypatch
):
    policy, taken = make_policy(**options), []
    monkeypatch.setattr(PolicyModel, "is_sharded", sharded)
    for kind in (hooked, swapped):
        monkeypatch.setattr(
            virtual_step, kind.__name__, lambda *given, kind=kind: taken.append(kind) or kind(*given)
        )
    with shifted(policy, random_direction(policy), 1.0):
        pass
    assert taken == [way]


def test_swapped_data_comes_back_as_it_was(make_policy):
    """The same memory, also if the parameters are views into a flat buffer, as ZeRO-1 and 2 have them."""
    policy = make_policy()
    parameters = list(policy.adapter().values())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)
    before, places = flat.clone(), [p.data_ptr() for p in parameters]
    for failing in (False, True):
        expected = pytest.raises(RuntimeError) if failing else contextlib.nullcontext()
        with expected, swapped(policy, random_direction(policy), 1e-7):
            assert all(p.data_ptr() != place for p, place in zip(parameters, places, strict=True))
            assert torch.equal(flat, before)
            if failing:
                raise RuntimeError
        assert [p.data_ptr() for p in parameters] == places and torch.equal(flat, before)
    flat.zero_()
    assert not any(p.any() for p in parameters)


@pytest.mark.parametrize("shifted", [hooked, swapped])
def test_an_exception_leaves_nothing_behind(shifted, make_policy, make_batch, monkeypatch):
    policy, batch = make_policy(), make_batch()
    direction = random_direction(policy)
    before, gradients = policy.log_probs(batch), gradient(policy, batch)

    def fails(*args, **kwargs):
        raise RuntimeError("in the middle of a shifted forward")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="middle"):
        patch.setattr(policy.model.base_model.layers[1], "forward", fails)
        with shifted(policy, direction, 1.0):
            policy.log_probs(batch)
    after = policy.log_probs(batch)
    assert torch.equal(before.chosen, after.chosen) and torch.equal(before.rejected, after.rejected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradient(policy, batch), strict=True))
    assert not any(linear._forward_hooks for linear in policy.lora_linears().values())

    broken = dict(list(direction.items())[:3])  # fails while the hooks are being installed
    with pytest.raises(KeyError), shifted(policy, broken, 1.0):
        pass
    assert not any(linear._forward_hooks for linear in policy.lora_linears().values())


def test_the_reference_does_not_move(make_policy, make_batch):
    policy, batch = make_policy(), make_batch()
    before = policy.reference_log_probs(batch)
    with shifted(policy, random_direction(policy), 1.0):
        inside = policy.reference_log_probs(batch)
    assert torch.equal(before.chosen, inside.chosen) and torch.equal(before.rejected, inside.rejected)


def test_a_tiny_shift_survives_a_bf16_base(make_policy, make_batch):
    """The shift is added in fp32: a relative step of 1e-4 of the adapter still moves its output."""
    policy, batch = make_policy(dtype="bfloat16", lora_compute_dtype="float32"), make_batch()
    assert all(p.dtype == torch.float32 for p in policy.adapter().values())
    direction = {k: p.detach().clone() for k, p in policy.adapter().items()}
    linear = policy.lora_linears()[next(iter(direction))]
    seen = []
    handle = linear.register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))
    with torch.no_grad():
        policy.log_probs(batch)
        seen.clear()
        policy.log_probs(batch)
        handle.remove()
        with shifted(policy, direction, 1e-4):
            handle = linear.register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))
            policy.log_probs(batch)
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[1], seen[0] * (1 + 1e-4), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "DoRA|Dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "trainable"),
        ({"init_lora_weights": False}, "identity"),
        ({"lora_dropuot": 1}, "lora_dropuot"),
    ],
)
def test_variants_that_bypass_the_linears_are_refused(options, message, save_model):
    with pytest.raises(UserError, match=message):
        PolicyModel(save_model("llama"), rank=4, lora_options=options).build()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-mixed"])
def test_the_check_before_training_leaves_no_trace(name, dtype, make_policy, make_batch):
    policy = make_policy(name, moved=False, dtype=dtype)
    before = {key: value.clone() for key, value in policy.adapter().items()}
    check_shifted(policy, make_batch(1))
    assert all(torch.equal(value, before[key]) for key, value in policy.adapter().items())


@pytest.mark.parametrize(("wrong", "passes"), [(virtual_step.STEPS[:1], True), (virtual_step.STEPS, False)])
def test_the_check_takes_a_larger_step(wrong, passes, make_policy, make_batch, monkeypatch):
    """Rounding may drown the first one; hooks that are half off at every step are refused."""

    def off(policy, direction, scale):
        return hooked(policy, direction, scale * (1.5 if scale in wrong else 1))

    monkeypatch.setattr(virtual_step, "hooked", off)
    refused = pytest.raises(UserError, match="LoRA layers that the virtual step misses")
    with contextlib.nullcontext() if passes else refused:
        check_shifted(make_policy(), make_batch(1))


def test_layers_that_hooks_miss_are_refused(make_policy, make_batch, monkeypatch):
    """As of a model whose layer computes with LoRA's matrices and does not call them."""
    policy = make_policy()
    layer = next(iter(policy._lora_layers.values()))

    def bypassed(x):
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        return layer.base_layer(x) + x @ a.T @ b.T * layer.scaling["default"]

    check_shifted(policy, make_batch(1))
    monkeypatch.setattr(layer, "forward", bypassed)
    with pytest.raises(UserError, match=r"LlamaForCausalLM .* has LoRA layers that the virtual step misses"):
        check_shifted(policy, make_batch(1))


def test_lora_on_experts_is_refused_by_name(mixtral, make_batch):
    """PEFT puts it on a tensor of all experts' weights where a model's linear layers are asked for."""
    policy = PolicyModel(mixtral, rank=2)
    policy.build()
    for refused in (
        lambda: check_shifted(policy, make_batch(1)),
        lambda: shifted(policy, random_direction(policy), 1.0).__enter__(),
    ):
        with pytest.raises(UserError, match=r"layers\.0\.mlp\S* .*\[k_proj, o_proj, q_proj, v_proj\]"):
            refused()
    plain = PolicyModel(mixtral, rank=2, target_modules=["k_proj", "o_proj", "q_proj", "v_proj"])
    plain.build()
    check_shifted(plain, make_batch(1))


@pytest.fixture
def mixtral(tmp_path):
    torch.manual_seed(0)
    config = MixtralConfig(**SHAPE, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mixtral")
    return str(tmp_path / "mixtral")
