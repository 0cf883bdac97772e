"""What a policy's base may be: a model, or an adapter in a folder or on the Hub, which is merged."""

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

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
