"""What a policy's base may be: a model, or an adapter in a folder or on the Hub, which is merged."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from pacmr_lightning.errors import UserError
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.base_model import adapter_base, load_base

from ...conftest import LLAMA

TOKENS = torch.arange(5, 25)[None]


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.fixture
def base(tiny_llama, tmp_path):
    return tiny_llama(tmp_path / "base", initializer_range=0.3)


def trained(base: str, folder: Path, config):
    """Save an adapter whose every trained number has moved; return what PEFT computes with it, unmerged."""
    torch.manual_seed(1)
    policy = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    policy.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    return logits(policy)


def lora(**options):
    return peft.LoraConfig(**{"r": 2, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **options})


ADAPTERS = {
    "lm_head": lora(target_modules=["q_proj", "lm_head"]),
    "embeddings": lora(target_modules=["q_proj", "embed_tokens"]),
    "both": lora(target_modules=["lm_head", "embed_tokens"]),
    "both, tied": lora(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
    "whole head": lora(modules_to_save=["lm_head"]),
    "whole embeddings": lora(modules_to_save=["embed_tokens"]),
    "some tokens": lora(trainable_token_indices=[7, 9]),
    "some tokens of the embeddings": lora(trainable_token_indices={"embed_tokens": [7, 9]}),
    "rslora": lora(use_rslora=True, r=4, rank_pattern={"layers.0.self_attn.q_proj": 8}),
    "dora": lora(use_dora=True),
    "loha": peft.LoHaConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "adalora": peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=9, target_modules=["q_proj"], task_type="CAUSAL_LM"
    ),
    "ia3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, about tied weights
@pytest.mark.parametrize(
    ("kind", "tied"),
    # Of "both, tied" on a model that is not, PEFT loads something else than it has saved.
    [(kind, tied) for kind in ADAPTERS for tied in (True, False) if tied or kind != "both, tied"],
)
def test_base_and_adapter_are_what_peft_computes(tiny_llama, tmp_path, kind, tied):
    base = tiny_llama(tmp_path / "base", initializer_range=0.3, tie_word_embeddings=tied)
    expected = trained(base, tmp_path / "adapter", ADAPTERS[kind])
    found = load_base(str(tmp_path / "adapter"), torch.float32)
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.05
    found.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    # A policy on it starts there, and ends as one model.
    policy = PolicyModel(str(tmp_path / "adapter"), rank=2)
    policy.build(announce=False)
    for model in (found, again, policy.model):
        torch.testing.assert_close(logits(model), expected, atol=2e-4, rtol=1e-4)


SOME = lora(r=3, target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("own", "first"),
    [("all-linear", SOME), (["lm_head", "q_proj"], SOME), ("all-linear", ADAPTERS["rslora"])],
    ids=["linear", "head", "rslora"],
)
def test_a_policy_on_an_adapter_is_saved_as_one_adapter(tiny_llama, tmp_path, own, first):
    plain = tiny_llama(tmp_path / "base", initializer_range=0.3, tie_word_embeddings=True)
    expected = trained(plain, tmp_path / "adapter", first)
    policy = PolicyModel(str(tmp_path / "adapter"), rank=4, target_modules=own)
    policy.build(announce=False)
    with torch.no_grad():
        for parameter in policy.adapter().values():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    policy.peft.save_pretrained(str(tmp_path / "saved"))
    assert adapter_base(str(tmp_path / "saved")) == plain
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(again), logits(policy.model), atol=2e-4, rtol=1e-4)
    assert (logits(again) - expected).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["dora", "whole head"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_policy_that_is_not_one_adapter_is_not_saved_as_one(base, tmp_path, kind):
    trained(base, tmp_path / "adapter", ADAPTERS[kind])
    policy = PolicyModel(str(tmp_path / "adapter"), rank=2)
    policy.build(announce=False)
    with pytest.raises(UserError, match=r"not one LoRA adapter for .*base .*merge_and_unload"):
        policy.peft.save_pretrained(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()
    expected = logits(policy.model)
    policy.peft.merge_and_unload().save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(again), expected, atol=2e-4, rtol=1e-4)


def test_experts_of_an_adapter_are_merged(tmp_path):
    torch.manual_seed(0)
    config = MixtralConfig(**LLAMA, num_key_value_heads=2, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    expected = trained(str(tmp_path / "base"), tmp_path / "adapter", lora(target_modules="all-linear"))
    found = load_base(str(tmp_path / "adapter"), torch.float32)
    torch.testing.assert_close(logits(found), expected, atol=2e-4, rtol=1e-4)


def test_adapters_whose_base_is_not_theirs(base, tmp_path):
    folder = tmp_path / "adapter"
    trained(base, folder, lora())
    file = folder / "adapter_config.json"
    for changes, said in (
        ({"base_model_name_or_path": None}, "does not name the model"),
        ({"base_model_name_or_path": str(tmp_path / "gone")}, r"adapter .*adapter was trained on .*gone"),
        ({"base_model_name_or_path": str(folder)}, "is an adapter itself; merge that one"),
        ({"base_model_name_or_path": base, "task_type": "SEQ_CLS"}, "for the task SEQ_CLS"),
        ({"task_type": None, "target_modules": ["q_proj", "v_proj"]}, "does not fit its base .*missing"),
        ({"target_modules": ["q_proj"], "r": 3}, "does not fit its base"),
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        with pytest.raises(UserError, match=said):
            load_base(str(folder), torch.float32)


def test_adapters_that_cannot_be_merged(base, tmp_path):
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    for config, said in (
        (prompt, "adapter is of PEFT's kind PROMPT_TUNING, which cannot be merged"),
        (lora(lora_bias=True), "adapter cannot be merged into its base .*base layer has no bias"),
    ):
        trained(base, tmp_path / "adapter", config)
        with pytest.raises(UserError, match=said):
            load_base(str(tmp_path / "adapter"), torch.float32)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("tied", [True, False])
def test_tokens_that_only_the_adapter_knows(tiny_llama, tiny_tokenizer_folder, tmp_path, tied):
    """They are its own where it has saved them, left out without rows, and a sentence if they were random."""
    base = tiny_llama(tmp_path / "base", initializer_range=0.3, tie_word_embeddings=tied)
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_folder)
    for saved in ("layers", "modules", "head", "tokens", ""):
        folder = tmp_path / f"adapter-{saved}"
        model = AutoModelForCausalLM.from_pretrained(base)
        known = model.get_input_embeddings().num_embeddings
        tokenizer.add_tokens([f"<{i}>" for i in range(known + 3 - len(tokenizer))])
        model.resize_token_embeddings(len(tokenizer))
        modules = {"modules": ["embed_tokens", "lm_head"], "head": ["lm_head"]}.get(saved)
        options = {"trainable_token_indices": [known]} if saved == "tokens" else {"modules_to_save": modules}
        policy = peft.get_peft_model(model, lora(init_lora_weights=False, **options))
        policy.save_pretrained(folder, save_embedding_layers=saved == "layers")
        tokenizer.save_pretrained(folder)
        if saved != "head":
            found = logits(load_base(str(folder), torch.float32))
            torch.testing.assert_close(found, logits(policy)[..., : found.shape[2]], atol=2e-4, rtol=1e-4)
            assert found.shape[2] == (len(tokenizer) if saved else known)
        else:
            with pytest.raises(UserError, match=r"has 3 tokens that its base .* lacks"):
                load_base(str(folder), torch.float32)


def edited(folder, to, **keys):
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | keys
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != ""}))
    return to


OWN_CODE = {"auto_map": {"AutoConfig": "a.B", "AutoModelForCausalLM": "c.D"}, "model_type": "x"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (OWN_CODE, "code of its own"),
        ({"model_type": "x"}, "model type `x` but Transformers does not recognize"),
        ({"model_type": ""}, "Should have a `model_type`"),
        ({"model_type": "vit"}, "ViTConfig is not of a causal language model"),
        ({"model_type": "t5"}, "is an encoder-decoder"),
        ({"hidden_size": 32}, "the weights have other shapes than in its config.json"),
        ({"num_hidden_layers": 9}, "weights of LlamaForCausalLM, the first being model.layers."),
    ],
)
def test_configs_that_are_of_no_usable_model(keys, said, base, tmp_path):
    folder = edited(base, tmp_path / "edited", **keys)
    with pytest.raises(UserError, match=said):
        load_base(str(folder), torch.float32)


def test_files_that_are_of_no_usable_model(base, tmp_path):
    broken = edited(base, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(UserError, match=r"broken cannot be loaded: a safetensors file is incomplete .*again"):
        load_base(str(broken), torch.float32)
    (broken / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"broken cannot be loaded: .*no file named model.safetensors"):
        load_base(str(broken), torch.float32)
    stored = load_base(base, torch.float32)
    torch.save(stored.state_dict(), broken / "pytorch_model.bin")
    assert torch.equal(logits(load_base(str(broken), torch.float32)), logits(stored))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"model.gguf is a file; name a folder"):
        load_base(str(tmp_path / "model.gguf"), torch.float32)
    # transformers would draw the head at random.
    said = "lacks 1 weights of LlamaForCausalLM, the first being lm_head.weight; name a causal language model"
    for headless in (transformers.AutoModel, transformers.AutoModelForSequenceClassification):
        headless.from_pretrained(base).save_pretrained(tmp_path / headless.__name__)
        with pytest.raises(UserError, match=said):
            load_base(str(tmp_path / headless.__name__), torch.float32)
