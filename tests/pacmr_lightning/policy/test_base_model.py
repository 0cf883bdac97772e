"""What a policy's base may be: a model, or an adapter in a folder or on the Hub, which is merged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

from pacmr_lightning.commands.audit_model import _base
from pacmr_lightning.commands.export import _bottom
from pacmr_lightning.errors import UserError
from pacmr_lightning.policy.base_model import load_base

TOKENS = torch.arange(5, 25)[None]


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.fixture
def model(tiny_llama, tmp_path):
    return tiny_llama(tmp_path / "model", initializer_range=0.3, hidden_size=64, intermediate_size=64)


@pytest.fixture
def adapter(model, tmp_path):
    """A folder with a LoRA adapter that has learned something, and what it makes of ``TOKENS``."""
    torch.manual_seed(1)
    policy = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model),
        LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    policy.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", logits(policy)


def put_on_hub(folder: Path, cache: Path, monkeypatch) -> str:
    """Where the Hub's client keeps what it has downloaded, without a network."""
    repository, revision = cache / "models--somebody--adapter", "0" * 40
    shutil.copytree(folder, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return "somebody/adapter"


@pytest.mark.filterwarnings("ignore:Unable to fetch remote file")  # of a tokenizer, which it has none of
@pytest.mark.parametrize("on_hub", [False, True])
def test_an_adapter_is_merged(adapter, model, on_hub, tmp_path, monkeypatch):
    """Also one that is named by its id on the Hub, which transformers would load beside its base."""
    folder, expected = adapter
    name = put_on_hub(folder, tmp_path / "hub", monkeypatch) if on_hub else str(folder)
    found = load_base(name, torch.float32, None)
    assert not hasattr(found, "peft_config")
    torch.testing.assert_close(logits(found), expected, atol=1e-4, rtol=1e-4)
    assert (logits(found) - logits(load_base(model, torch.float32, None))).abs().max() > 0.1
    assert _base(name) == _bottom(name) == model


def test_adapters_that_are_no_change_of_weights(model, tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(tmp_path / "prompt")
    with pytest.raises(UserError, match=r"prompt is of PEFT's kind PROMPT_TUNING, which cannot be merged"):
        load_base(str(tmp_path / "prompt"), torch.float32, None)


def test_an_adapter_of_a_base_in_4_bits(model, tmp_path):
    """As unsloth leaves them: the stored base is quantised, and would round the adapter away."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes, the extra quantization, is not installed")
    packed = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    )
    packed.save_pretrained(tmp_path / "packed")
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"), config)
    policy.save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        UserError, match=r"adapter was trained on .*packed, which is stored in 4 bits.*in full"
    ):
        load_base(str(tmp_path / "adapter"), torch.float32, None)


def test_names_that_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, said in (
        ("./nowhere", "does not exist"),
        ("nobody/nothing", "nobody/nothing cannot be loaded: "),
    ):
        with pytest.raises(UserError, match=said):
            load_base(name, torch.float32, None)


def edited(folder, to, **keys):
    """A copy of a model whose config.json has other keys."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | keys
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != ""}))
    return to


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"auto_map": {"AutoConfig": "a.B", "AutoModelForCausalLM": "c.D"}, "model_type": "x"},
            "code of its own",
        ),
        ({"model_type": "x"}, "model type `x` but Transformers does not recognize"),
        ({"model_type": ""}, "Should have a `model_type`"),
        ({"model_type": "vit"}, "ViTConfig is not of a causal language model"),
        ({"model_type": "t5"}, "is an encoder-decoder"),
        ({"hidden_size": 32}, "the weights have other shapes than its config.json says"),
        ({"num_hidden_layers": 9}, "weights of LlamaForCausalLM, the first being model.layers."),
    ],
)
def test_configs_that_are_of_no_usable_model(keys, said, model, tmp_path):
    folder = edited(model, tmp_path / "edited", **keys)
    with pytest.raises(UserError, match=said):
        load_base(str(folder), torch.float32, None)


def test_files_that_are_of_no_usable_model(model, tmp_path):
    broken = edited(model, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(UserError, match=r"broken cannot be loaded: a safetensors file is incomplete .*again"):
        load_base(str(broken), torch.float32, None)
    (broken / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"broken cannot be loaded: .*no file named model.safetensors"):
        load_base(str(broken), torch.float32, None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"model.gguf is a file; name a folder"):
        load_base(str(tmp_path / "model.gguf"), torch.float32, None)


@pytest.mark.parametrize("headless", [AutoModel, AutoModelForSequenceClassification])
def test_a_model_without_a_head(headless, model, tmp_path):
    """transformers would draw one at random."""
    headless.from_pretrained(model).save_pretrained(tmp_path / "headless")
    with pytest.raises(
        UserError, match=r"lacks 1 weights of LlamaForCausalLM, the first being lm_head.weight"
    ):
        load_base(str(tmp_path / "headless"), torch.float32, None)


def test_weights_in_torchs_own_format(model, tmp_path):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    folder = edited(model, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save(loaded.state_dict(), folder / "pytorch_model.bin")
    assert torch.equal(logits(load_base(str(folder), torch.float32, None)), logits(loaded))
