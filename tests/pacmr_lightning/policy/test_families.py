"""Model families beyond the common ones: each is computed as by hand, or refused in one sentence."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.policy import PolicyModel

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES = {
    "bert": SIZE,
    "ctrl": {"n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama4_text": SIZE | EXPERTS | {"intermediate_size_mlp": 48},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "phimoe": SIZE | EXPERTS,
    "recurrent_gemma": SIZE | {"num_hidden_layers": 3, "lru_width": 32, "head_dim": 16},
    "roberta": SIZE | {"is_decoder": True},
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48},
}
PAIR = [7, 8, 9, 10, 11], [12, 13, 14], [15, 16]


@pytest.fixture
def save(tmp_path):
    def save(family):
        torch.manual_seed(0)
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = AutoConfig.for_model(family, vocab_size=64, **special, **FAMILIES[family])
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return save


def by_hand(folder, prompt, response):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response]), use_cache=False).logits
    predicted = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return predicted[torch.arange(len(response)), torch.tensor(response)].sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("ctrl", "all-linear"),
        ("recurrent_gemma", "all-linear"),
        ("roberta", "all-linear"),
        ("rwkv", "all-linear"),
        ("llama4_text", "all-linear"),
        ("phimoe", "all-linear"),
        ("mamba", ["in_proj", "x_proj"]),
    ],
)
def test_families_that_work(family, targets, save):
    """RoBERTa counts its positions from elsewhere, CTRL scales embeddings in place, RWKV has no heads.

    Routers of Llama 4 and Phi-MoE return several tensors, which an adapter's layer does not take.
    """
    folder = save(family)
    policy = PolicyModel(folder, rank=2, target_modules=targets)
    policy.build()
    prompt, chosen, rejected = PAIR
    found = policy.log_probs(
        PairBatch.collate(["a", "b"], [prompt, prompt[:2]], [chosen] * 2, [rejected] * 2)
    )
    torch.testing.assert_close(found.chosen[0], by_hand(folder, prompt, chosen), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.rejected[1], by_hand(folder, prompt[:2], rejected), atol=1e-4, rtol=0)
    found.chosen.sum().backward()
    assert all(weight.grad is not None for weight in policy.adapter().values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("bert", "predictions of BertLMHeadModel change by .* with the tokens after them"),
        ("xlnet", "predictions of XLNetLMHeadModel change by .* with the tokens after them"),
        ("mamba", r"all-linear, which PEFT cannot adapt in MambaForCausalLM.*\[dt_proj, in_proj, x_proj\]"),
    ],
)
def test_families_that_are_refused(family, said, save):
    with pytest.raises(UserError, match=said):
        policy = PolicyModel(save(family), rank=2)
        policy.build()
        policy.log_probs(PairBatch.collate(["a"], *([part] for part in PAIR)))


def test_adapters_on_layers_that_are_never_called(save):
    policy = PolicyModel(save("mamba"), rank=2, target_modules=["dt_proj", "in_proj"])
    policy.build()
    said = r"does not call 2 of its 4 layers.*layers.0.mixer.dt_proj.*\[in_proj, out_proj, x_proj\]"
    with pytest.raises(UserError, match=said):
        policy.log_probs(PairBatch.collate(["a"], *([part] for part in PAIR)))
