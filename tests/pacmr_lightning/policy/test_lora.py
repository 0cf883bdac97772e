"""LoRA's initial weights, and a policy's options: what does nothing is refused, with what to type instead."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from pacmr_lightning.audit import AuditOptions, audit
from pacmr_lightning.commands.refine import refine
from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule, SFTDataModule
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import PromptAugmentationConsistency
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.lora import add_lora
from pacmr_lightning.policy.packed_attention import VARLEN

FLASH = {"attn_implementation": "flash_attention_2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_options": {"lora_alpha": 8}}, "set the option alpha instead"),
        ({"lora_options": {"target_modules": ["q"]}}, "set the option target_modules, beside lora_options"),
        ({"lora_options": {"lora_dropout": 0.1}}, "'lora_dropout', .* dropout is always off"),
        ({"lora_options": {"use_dora": True}}, r"'use_dora', but it takes alpha.*, use_rslora; remove it\.$"),
        ({"lora_options": {"rank": 4}}, "'rank', .* remove it"),
        (FLASH, "base is float32; set dtype to bfloat16"),
        (FLASH | {"dtype": "bfloat16", "layout": "shared"}, "does not take the mask of the layout shared"),
        ({"attn_implementation": "flash"}, "is flash, but it must be one of auto, eager, .*sdpa"),
        ({"attn_implementation": "flex_attention"}, "is flex_attention, but it must be one of auto, eager"),
        ({"attn_implementation": VARLEN}, "is varlen, but it must be one of auto, eager"),
    ],
)
def test_options_that_it_does_not_take(options, message):
    with pytest.raises(UserError, match=message):
        PolicyModel("anything", **options)


ALL = "all-linear"
LACKS = (
    r"^target_modules .*(LlamaForCausalLM has no such module|not found in the base model).*"
    r"\[down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj\]"
)


@pytest.mark.parametrize(
    ("modules", "options", "message"),
    [
        (["query_key_value"], None, LACKS),
        (["q_proj", "query_key_value"], None, LACKS),
        # A bare name PEFT takes for a whole one.
        ("query_key_value", None, LACKS),
        ("q_proj", None, LACKS),
        (
            ["self_attn"],
            None,
            r"\['self_attn'\] cannot be used with this model .Target module Llama.*some of \[down_",
        ),
        (["embed_tokens"], None, "embed_tokens, where PEFT's layer is of the kind Embedding, but"),
        (["q_proj"], {"layers_to_transform": [0, 9]}, "layer 9 in layers_to_transform, which adapts nothing"),
        (r".*\.q_proj", {"layers_to_transform": [0]}, "is a str.; set target_modules to a list of names"),
        (ALL, {"rank_pattern": {"nope": 2}}, r"rank_pattern keys did not match.*\['nope'\]"),
        (ALL, {"exclude_modules": ["lm_head", "nope"]}, "exclude_modules names nope, .*; leave it out"),
        (ALL, {"init_lora_weights": "eva"}, "init_lora_weights eva, which needs data"),
        (ALL, {"init_lora_weights": "nonsense"}, "cannot be used with this model .Unknown initialization"),
        (ALL, {"init_lora_weights": False}, "does not start as the identity"),
    ],
)
def test_what_the_model_lacks_or_is_without_effect(modules, options, message, save_model):
    with pytest.raises(UserError, match=message):
        PolicyModel(save_model("llama"), target_modules=modules, lora_options=options).build()


def test_options_that_have_an_effect_beside_pefts_defaults(save_model):
    options = {"rank_pattern": {"q_proj": 2}, "exclude_modules": ["down_proj"], "use_rslora": True}
    options |= {"layers_to_transform": [1]}
    default = {"bias": "none", "use_dora": False, "modules_to_save": None, "loftq_config": {}}
    policy = PolicyModel(save_model("llama"), rank=4, lora_options=options | default)
    policy.build()
    shapes = {name.split(".")[-4]: a.shape for name, a in policy.adapter().items() if "lora_A" in name}
    assert "down_proj" not in shapes and shapes["q_proj"][0] == 2 and shapes["v_proj"][0] == 4
    assert all(".layers.1." in name for name in policy.adapter()) and len(shapes) == 6


def test_a_regular_expression_and_conv1d(save_model):
    policy = PolicyModel(save_model("llama"), target_modules=r".*\.0\..*(q|v)_proj")
    policy.build()
    assert len(policy.adapter()) == 4
    with pytest.raises(UserError, match=r"names q_proj, .*\[c_attn, c_fc, c_proj\]"):
        PolicyModel(save_model("gpt2"), target_modules=["q_proj"]).build()


def test_a_module_that_there_is_not(save_model):
    model = AutoModelForCausalLM.from_pretrained(save_model("llama"))
    with pytest.raises(UserError, match="modules_to_save names nope, but"):
        add_lora(model, {"r": 2, "target_modules": "all-linear", "modules_to_save": ["nope"]}, "lora")
    with pytest.raises(UserError, match="lora has bias lora_only, but there is no bias to train; leave it"):
        add_lora(model, {"r": 2, "target_modules": "all-linear", "bias": "lora_only"}, "lora")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolicyModel("a", layout="Separate"), "Separate, but it must be auto, shared or separate"),
        (lambda: PolicyModel("a", dtype="float16"), "float16, but it must be auto, float32 or bfloat16"),
        (lambda: PolicyModel("a", lora_compute_dtype="bfloat16"), "bfloat16, but it must be float32 or base"),
        (lambda: PolicyModel("a", gradient_checkpointing="selectiv"), "selectiv, but it must be auto, "),
        (lambda: AuditOptions(action="flip"), "flip, but it must be drop, swap or None"),
        (lambda: AuditOptions(scorer="poliy"), "poliy, but it must be probe, policy, dpo, judge or None"),
        (lambda: refine("run", labels="hard"), "hard, but it must be soft, weights, drop, swap or easiest"),
        (lambda: PolicyModel("a", alpha=0), "alpha is 0, but it must be above 0"),
        (lambda: PromptAugmentationConsistency(normalize="M"), "M, but it must be meta or retained"),
        (lambda: PreferenceDataModule("a.jsonl", "a", reference="Live"), "must be live or cached"),
        (lambda: audit("a", [{}]), "source is a list, but it must be .*; write rows to a JSON Lines file"),
        (lambda: audit(PolicyModel("a"), "b"), "run is a PolicyModel, but it must be a folder, a Hub id"),
        (lambda: SFTDataModule(EmbeddedWorld(8), "a", tokenization="X"), "must be default or openrlhf"),
    ],
)
def test_values_from_python(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_an_adapter_starts_alike_on_every_device(save_model):
    """Lightning makes models with torch's default device a GPU, whose generator ZeRO-3 has used by then."""
    name, found = save_model("llama"), []
    for default in ("cpu", "meta"):
        model = AutoModelForCausalLM.from_pretrained(name)
        torch.manual_seed(3)
        with torch.device(default):
            adapted = add_lora(model, {"r": 2, "target_modules": "all-linear"}, "lora_options")
        found.append([weight for name, weight in adapted.named_parameters() if "lora_" in name])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
