"""Packed pairs with shared prompts: where they are taken or refused; test_logprobs.py has their values.

``varlen_attn`` runs on GPUs only. Here SDPA runs each sequence; what the kernel is called with is checked on
tensors without contents.
"""

import inspect
import logging

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import Gemma2Config, Gemma2ForCausalLM, MixtralConfig, MixtralForCausalLM

from pacmr_lightning.policy import PolicyModel, packed_attention
from pacmr_lightning.policy.attention import AttentionPlan, use_attention
from pacmr_lightning.policy.packed_attention import VARLEN
from pacmr_lightning.policy.token_layout import rows_of

from ..conftest import SHAPE
from .looped_attention import looped_attention

PACKED = AttentionPlan(VARLEN, "packed")


def test_experts(make_batch, packed, tmp_path):
    packed()
    config = MixtralConfig(**{**SHAPE, "num_local_experts": 4, "sliding_window": 7})
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    policy = PolicyModel(str(tmp_path), target_modules=["q_proj", "v_proj"])
    policy.build(announce=False)
    found, batch = policy.log_probs(make_batch()), make_batch()
    assert policy._plan == PACKED
    use_attention(policy.model, "sdpa")
    torch.testing.assert_close(found.chosen, policy.score(rows_of("plain", batch)).chosen, atol=1e-4, rtol=0)


def test_the_kernel_is_called_as_it_allows(make_policy, make_batch, monkeypatch):
    """With the arguments of a model of grouped heads and windows."""
    calls = []

    def watched(*arguments, **options):
        inspect.signature(varlen_attn).bind(*arguments, **options)
        calls.append((arguments, options))
        return looped_attention(*arguments, **options)

    policy = make_policy("qwen2-mixed", layout="packed")
    monkeypatch.setattr(packed_attention, "varlen_attn", watched)
    policy.log_probs(batch := make_batch())
    assert [options["window_size"] for _, options in calls[-2:]] == [(-1, 0), (6, 0)]
    assert {options["scale"] for _, options in calls} == {8**-0.5}
    arguments, options = calls[-1]
    assert len(arguments[0]) == batch.token_count < batch.input_ids.numel(), "no padding"
    with torch.device("meta"):
        heads = [torch.empty(x.shape, dtype=torch.bfloat16, requires_grad=True) for x in arguments[:3]]
        ends = [torch.empty(x.shape, dtype=torch.int32) for x in arguments[3:5]]
        out = varlen_attn(*heads, *ends, *arguments[5:], **options)
        assert out.shape == arguments[0].shape
        gradients = torch.autograd.grad(out.sum(), heads)
    assert [g.shape for g in gradients] == [x.shape for x in arguments[:3]]


def test_other_passes_of_the_same_model(make_policy, make_batch, caplog):
    policy, batch = make_policy(layout="packed"), make_batch()
    with caplog.at_level(logging.INFO):
        policy.log_probs(batch)
    policy.log_probs(make_batch(2, longest=40))  # checked again
    assert policy._plan == PACKED
    assert "computed from pairs with a shared prompt packed into one row with varlen attention" in caplog.text
    # Other passes of the same model have the kernel's masks.
    plain = policy.score(rows_of("plain", batch))
    tokens = policy.generate(input_ids=batch.input_ids[:1, :4], max_new_tokens=3, do_sample=False)
    use_attention(policy.model, "sdpa")
    assert torch.equal(plain.chosen, policy.score(rows_of("plain", batch)).chosen)
    again = policy.generate(input_ids=batch.input_ids[:1, :4], max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, again) and tokens.shape[1] > 4


def test_capped_scores_fall_back(make_batch, packed, tmp_path):
    """Gemma 2 caps its scores, and its logits."""
    packed()
    Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8)).save_pretrained(tmp_path)
    policy = PolicyModel(str(tmp_path))
    policy.build(announce=False)
    with pytest.warns(UserWarning, match=r"does not use pairs .*\(it fails with ValueError: .*no softcap"):
        policy.log_probs(make_batch())
    assert policy._plan.attention != VARLEN


def test_a_wrong_kernel_is_found(make_policy, make_batch, monkeypatch):
    """With a window that nobody asked for."""

    def near(*inputs, **options):
        return looped_attention(*inputs, **options | {"window_size": (3, 0)})

    policy = make_policy(layout="packed")
    monkeypatch.setattr(packed_attention, "varlen_attn", near)
    with pytest.warns(UserWarning, match="log-probabilities differ .* falling back to a shared prompt"):
        policy.log_probs(make_batch())
    assert policy._plan == AttentionPlan("sdpa", "shared") and policy.attention == "sdpa"
