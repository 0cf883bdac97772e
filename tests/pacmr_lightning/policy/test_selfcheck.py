"""The self-check where rounding in bfloat16 grows with large activations; and in several processes."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.policy import PolicyModel, selfcheck
from pacmr_lightning.policy.attention import AttentionPlan

from ..conftest import CONFIGS, SHAPE

GEMMA = Gemma3TextConfig(
    **SHAPE | {"num_hidden_layers": 6, "initializer_range": 0.1, "head_dim": 16},
    sliding_window=16,
    query_pre_attn_scalar=16,
    layer_types=["sliding_attention"] * 5 + ["full_attention"],
)


def random_pair():
    generator = torch.Generator().manual_seed(1)
    parts = (torch.randint(3, 61, (length,), generator=generator).tolist() for length in (20, 4, 30))
    return PairBatch.collate(["x"], *([part] for part in parts))


@pytest.fixture
def make_large(tmp_path):
    """A policy whose norms multiply, as in trained models, so that rounding grows from layer to layer."""

    def make(config=GEMMA, **options):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name or ".ln_" in name:
                    weight.copy_(8 * torch.rand_like(weight))
        model.to(torch.bfloat16).save_pretrained(tmp_path / config.model_type)
        policy = PolicyModel(str(tmp_path / config.model_type), rank=2, **{"dtype": "bfloat16", **options})
        policy.build()
        return policy

    return make


@pytest.mark.parametrize("name", ["gemma3", *CONFIGS])
def test_rounding_is_no_fault(name, make_large):
    policy = make_large(CONFIGS.get(name, GEMMA))
    before = {key: weight.clone() for key, weight in policy.named_parameters()}
    policy.log_probs(random_pair())
    assert policy._plan == AttentionPlan("sdpa", "shared")
    after = dict(policy.named_parameters())
    assert all(after[key].dtype == w.dtype and torch.equal(after[key], w) for key, w in before.items())


def test_without_that_it_would_be(make_large, monkeypatch):
    monkeypatch.setattr(selfcheck, "ROUNDING_FACTOR", 0)
    policy = make_large()
    with pytest.warns(UserWarning), pytest.raises(UserError, match=r"No layout .* Gemma3.*to eager,"):
        policy.log_probs(random_pair())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_that_is_wrong_in_one_dtype(dtype, make_policy, make_batch, monkeypatch):
    right = F.scaled_dot_product_attention

    def wrong(query, key, value, attn_mask=None, **options):
        fast = torch.backends.cuda.flash_sdp_enabled() and query.dtype == getattr(torch, dtype)
        masked = attn_mask is not None and attn_mask.dtype != torch.bool
        return right(query, key, value.detach() if fast and masked else value, attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    policy = make_policy(dtype=dtype)
    with pytest.warns(UserWarning, match="a shared prompt .*.its gradient is .*% off.; falling back"):
        policy.log_probs(make_batch())
    assert policy._plan == AttentionPlan("sdpa", "separate")


def test_a_fault_in_another_process(make_policy, make_batch, monkeypatch):
    others = iter((1, 0))
    monkeypatch.setattr(selfcheck, "max_over_ranks", lambda own, device: max(own, next(others)))
    policy = make_policy()
    with pytest.warns(UserWarning, match="shared prompt .*it fails in another process.; falling back to one"):
        policy.log_probs(make_batch())
    assert policy._plan == AttentionPlan("sdpa", "separate")
