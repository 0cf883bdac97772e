"""How many positions a model has, and pairs that it cannot read."""

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pacmr_lightning.audit import AuditOptions, audit
from pacmr_lightning.datamodules import PreferenceDataModule, SFTDataModule
from pacmr_lightning.datamodules.sources import CompletionFiles, Files
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import PreferenceModule, SFTModule
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.positions import check_tokens, positions

from ...conftest import quiet_trainer


def scaled(kind, **keys):
    return {"max_position_embeddings": 64, "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **keys}}


@pytest.mark.parametrize(
    ("kind", "keys", "limit"),
    [
        ("llama", {"max_position_embeddings": 64}, 64),
        ("gpt2", {"n_positions": 64}, 64),
        ("mpt", {"max_seq_len": 64}, 64),
        ("bloom", {}, None),
        ("falcon", {"alibi": True}, None),
        ("falcon", {"alibi": False, "max_position_embeddings": 64}, 64),
        ("llama", scaled("linear", factor=4.0), 256),
        ("llama", scaled("yarn", factor=4.0, original_max_position_embeddings=64), 256),
        ("llama", scaled("yarn", factor=2.0, original_max_position_embeddings=32), 64),
        ("gemma3", {"text_config": {"max_position_embeddings": 64}}, 64),
    ],
)
def test_positions(kind, keys, limit):
    assert positions(AutoConfig.for_model(kind, **keys)) == limit


def test_the_most_that_fits(save_model):
    model = AutoModelForCausalLM.from_pretrained(save_model("llama"))
    limit, largest = positions(model.config), model.config.vocab_size - 1
    check_tokens("m", model, np.array([limit]), largest)
    said = rf"1 of 2 rows are longer than the {limit} positions .* set max_length to {limit} or less"
    with pytest.raises(UserError, match=said):
        check_tokens("m", model, np.array([limit + 1, 1]), largest)


@pytest.fixture
def pairs(write_rows, pair_rows):
    return write_rows(pair_rows(8))


def preference(model, pairs, **options):
    sizes = {"global_batch_size": 4, "validation_batch_size": 4, "max_length": 256}
    return PreferenceDataModule(Files(pairs, pairs), model, **sizes, **options)


@pytest.mark.filterwarnings("ignore")
def test_longer_pairs_are_told_before_anything_is_computed(tiny_llama, pairs, write_rows, tmp_path):
    short = tiny_llama(tmp_path / "short", max_position_embeddings=16)
    said = r"8 of 8 rows are longer than the 16 positions of the model .*short \(the longest has \d+ tokens\)"
    for start, reference in (("fit", "live"), ("fit", "cached"), ("validate", "live")):
        module, data = PreferenceModule(PolicyModel(short)), preference(short, pairs, reference=reference)
        with pytest.raises(UserError, match=said):
            getattr(quiet_trainer(tmp_path), start)(module, data)
    with pytest.raises(UserError, match=said):
        audit(short, Files(pairs), AuditOptions("probe", str(tmp_path / "audit")))
    row = {"prompt": "What is it of many?", "completion": " It is one of many."}
    rows = write_rows([row] * 8, "sft.jsonl")
    data = SFTDataModule(CompletionFiles(rows, rows), tokenizer=short, batch_size=4)
    for start in ("fit", "validate"):
        with pytest.raises(UserError, match=said):
            getattr(quiet_trainer(tmp_path, max_steps=1), start)(SFTModule(model=short), data)


@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_with_tokens_that_the_model_lacks(tiny_llama, tiny_tokenizer_folder, pairs, tmp_path):
    larger = AutoTokenizer.from_pretrained(tiny_tokenizer_folder)
    rows = len(larger)
    model = tiny_llama(tmp_path / "model", vocab_size=rows)
    larger.add_tokens(["best of"])
    larger.save_pretrained(model)
    said = rf"The tokenizer has the token id {rows}, but the model .* has {rows} embeddings"
    module = PreferenceModule(PolicyModel(model))
    for start in ("fit", "validate", "predict"):
        with pytest.raises(UserError, match=said):
            getattr(quiet_trainer(tmp_path), start)(module, preference(model, pairs))
