"""FlashAttention and packed pairs against SDPA, and the choice between attentions.

Kernels for GPUs are stood in for by SDPA on one sequence at a time: FlashAttention's behind transformers' own
code for it, and that of torch's ``varlen_attn`` for packed pairs, of which test_logprobs.py has the values.
"""

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import Gemma2Config, MixtralConfig
from transformers import modeling_flash_attention_utils as module

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.policy import PolicyModel, packed_attention
from pacmr_lightning.policy.attention import AttentionPlan, attention_of, attention_plans, use_attention
from pacmr_lightning.policy.packed_attention import VARLEN
from pacmr_lightning.policy.selfcheck import JUDGE_BYTES, TOLERANCE
from pacmr_lightning.policy.token_layout import rows_of, separate_rows

from ..conftest import SHAPE
from .looped_attention import looped_attention

GPU = torch.device("cuda")


@pytest.fixture
def flash_on_cpu(monkeypatch):
    """A stand-in for flash_attn's kernels; yields the lengths of the sequences of each call."""
    calls = []

    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale, window_size=(-1, -1), **_):
        assert causal and cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
        calls.append(cu_seqlens_q.diff().tolist())
        options = {"scale": softmax_scale, "window_size": window_size}
        return looped_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)

    loaded = {"_loaded_implementation": "flash_attention_2", "_flash_fn": None, "_flash_varlen_fn": varlen}
    loaded |= {"_pad_fn": module._pad_input, "_unpad_fn": module._unpad_input}
    loaded["_process_flash_kwargs_fn"] = module._lazy_define_process_function(varlen)
    for name, value in loaded.items():
        monkeypatch.setattr(module, name, value)
    return calls


def values_and_gradient(policy: PolicyModel, layout: str, batch: PairBatch) -> list[torch.Tensor]:
    found = policy.score(rows_of(layout, batch))
    loss = (found.chosen * torch.linspace(-1, 1, len(batch)) - found.rejected).sum()
    gradient = torch.autograd.grad(loss, list(policy.adapter().values()))
    return [found.chosen, found.rejected, *gradient]


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed", "mistral", "gpt2"])
def test_flash_attention(name, flash_on_cpu, make_policy, make_batch):
    policy, batch = make_policy(name), make_batch()
    truth = values_and_gradient(policy, "plain", batch)
    policy.model.config._attn_implementation = "flash_attention_2"  # else transformers looks for the package
    plans = attention_plans(policy.model, "flash_attention_2", "auto", GPU)
    assert plans == [AttentionPlan("flash_attention_2", layout) for layout in ("separate", "plain")]
    for plan in plans:
        for found, expected in zip(values_and_gradient(policy, plan.layout, batch), truth, strict=True):
            tolerance = 1e-4 * float(1 + expected.detach().abs().max())
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    lengths = separate_rows(batch).real.sum(1).tolist()
    assert flash_on_cpu == [lengths] * 2 * policy.model.config.num_hidden_layers  # without padding


@pytest.mark.parametrize(("limit", "efficient"), [(JUDGE_BYTES, False), (1000, True)])
def test_the_judge_keeps_no_large_weights(limit, efficient, make_policy, make_batch, monkeypatch):
    """Its kernel is SDPA's plain one, unless that would keep too much."""
    monkeypatch.setattr("pacmr_lightning.policy.selfcheck.JUDGE_BYTES", limit)
    policy, backends, enabled = make_policy(), torch.backends.cuda, []
    policy.model.base_model.register_forward_pre_hook(
        lambda *_: enabled.append((backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()))
    )
    policy.log_probs(make_batch(1))
    assert set(enabled[:5]) == {(False, efficient)} and set(enabled[5:]) == {(True, True)}


@pytest.mark.filterwarnings("ignore:LlamaForCausalLM does not use")
@pytest.mark.parametrize(("tokens_worth", "layout"), [(55, "shared"), (62, "plain")])
def test_each_response_is_judged_by_its_own_tokens(tokens_worth, layout, make_policy, monkeypatch):
    """A long response (of 58 tokens) sums up more rounding than a short one beside it."""
    policy = make_policy()
    tokens = torch.arange(3, 60).tolist()
    pair = PairBatch.collate(["x"], [tokens[:9]], [[*tokens, 2]], [[5, 2]])
    right, error = policy.score, tokens_worth * TOLERANCE[torch.float32]

    def noisy(rows, *arguments):
        found = right(rows, *arguments)
        found.chosen = found.chosen + (not rows.whole_logits) * error
        return found

    monkeypatch.setattr(policy, "score", noisy)
    policy.log_probs(pair)
    assert policy._plan == AttentionPlan("sdpa", layout)


def test_the_check_leaves_the_mode_and_keeps_checkpoints(make_policy, make_batch):
    """Validation may come first: in inference mode, and without checkpoints."""
    policy = make_policy(gradient_checkpointing=True).eval()
    modes = []
    policy.model.base_model.register_forward_pre_hook(lambda module, inputs: modes.append(module.training))
    with torch.inference_mode():
        policy.log_probs(make_batch())
    assert modes[:2] == [True, True] and modes[-1] is False
    assert not any(module.training for module in policy.modules()) and policy._plan == SDPA[0]


SDPA = [AttentionPlan("sdpa", "shared"), AttentionPlan("sdpa", "separate"), AttentionPlan("sdpa", "plain")]
PACKED = AttentionPlan(VARLEN, "packed")


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("llama", {"dtype": "bfloat16"}, [PACKED, *SDPA]),
        ("gpt2", {"dtype": "bfloat16"}, [PACKED, *SDPA]),
        ("llama", {"dtype": "bfloat16", "layout": "shared"}, [PACKED, *SDPA]),
        ("llama", {"dtype": "float32"}, SDPA),
        ("llama", {"dtype": "bfloat16", "layout": "separate"}, SDPA[1:]),
        ("llama", {"dtype": "bfloat16", "attn_implementation": "sdpa"}, SDPA),
    ],
)
def test_what_is_tried_on_a_gpu(name, options, expected, make_policy):
    policy = make_policy(name, **options)
    asked = policy.model, policy.attn_implementation, policy.layout
    assert attention_plans(*asked, GPU) == expected
    others = [plan for plan in expected if plan != PACKED]
    assert attention_plans(*asked, torch.device("cpu")) == others


def test_no_pass_takes_cudnn(make_policy, make_batch):
    """Forward, recomputed in backward, and generation, after the check has chosen kernels."""
    backends, seen = torch.backends.cuda, []
    backends.enable_cudnn_sdp(True)
    policy, batch = make_policy(gradient_checkpointing=True).train(), make_batch()
    policy.log_probs(batch)
    policy.model.base_model.layers[0].self_attn.register_forward_pre_hook(
        lambda *_: seen.append((backends.cudnn_sdp_enabled(), backends.flash_sdp_enabled()))
    )
    policy.log_probs(batch).chosen.sum().backward()
    assert len(seen) == 2
    policy.generate(input_ids=batch.input_ids[:1, :4], max_new_tokens=2, do_sample=False)
    assert len(seen) == 4 and set(seen) == {(False, True)}


def test_packed_pairs_of_experts(make_policy, make_batch):
    config = MixtralConfig(**{**SHAPE, "num_local_experts": 4, "sliding_window": 7})
    policy = make_policy(config, layout="packed", target_modules=["q_proj", "v_proj"])
    for layer in policy.model.base_model.layers:
        layer.self_attn.scaling = 0.2  # as of models with a scale of their own
    found, batch = policy.log_probs(make_batch()), make_batch()
    assert policy._plan == PACKED
    use_attention(policy.model, "sdpa")
    torch.testing.assert_close(found.chosen, policy.score(rows_of("plain", batch)).chosen, atol=1e-4, rtol=0)


def test_other_passes_of_a_model_that_packs(make_policy, make_batch, caplog):
    policy, batch = make_policy(layout="packed"), make_batch()
    policy.log_probs(batch)
    policy.log_probs(make_batch(2, longest=40))  # checked again
    assert policy._plan == PACKED
    assert policy.rows(batch).input_ids.numel() == batch.token_count < batch.input_ids.numel(), "no padding"
    assert "computed from pairs with a shared prompt packed into one row with varlen attention" in caplog.text
    # Other passes of the same model have the kernel's masks.
    plain = policy.score(rows_of("plain", batch))
    tokens = policy.generate(input_ids=batch.input_ids[:1, :4], max_new_tokens=3, do_sample=False)
    use_attention(policy.model, "sdpa")
    assert torch.equal(plain.chosen, policy.score(rows_of("plain", batch)).chosen)
    again = policy.generate(input_ids=batch.input_ids[:1, :4], max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, again) and tokens.shape[1] > 4


def test_capped_scores_fall_back(make_policy, make_batch):
    policy = make_policy(Gemma2Config(**SHAPE, head_dim=8), layout="packed")
    with pytest.warns(UserWarning, match=r"does not use pairs .*\(it fails with ValueError: .*no softcap"):
        policy.log_probs(make_batch())
    assert policy._plan.attention != VARLEN


def test_a_wrong_kernel_is_found(make_policy, make_batch, monkeypatch):
    def near(*inputs, **options):
        return varlen_attn(*inputs, **options | {"window_size": (3, 0)})

    policy = make_policy(layout="packed")
    monkeypatch.setattr(packed_attention, "varlen_attn", near)
    with pytest.warns(UserWarning, match="log-probabilities differ .* falling back to a shared prompt"):
        policy.log_probs(make_batch())
    assert policy._plan == AttentionPlan("sdpa", "shared") and attention_of(policy.model) == "sdpa"
