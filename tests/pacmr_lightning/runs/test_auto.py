"""gradient_checkpointing: auto on a GPU, by what a step takes and what is free."""

from types import SimpleNamespace

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.strategies import DeepSpeedStrategy
from transformers import AutoModelForCausalLM, LlamaConfig

from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.runs import config as module
from pacmr_lightning.runs.memory_estimate import step_bytes

GPU = torch.device("cuda")


@pytest.fixture
def folder(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, **shape)).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def decided(folder, monkeypatch):
    """What is decided with so many bytes free, what the configuration then has, and what was printed."""

    def run(free: float, asked="auto", strategy=None, device=GPU, attention="auto", **options):
        policy = PolicyModel(folder, rank=8, gradient_checkpointing=True, attn_implementation=attention)
        given = Namespace(gradient_checkpointing=asked)
        config = Namespace(model=Namespace(init_args=Namespace(policy=Namespace(init_args=given))))
        strategy = strategy or SimpleNamespace(root_device=device)
        data = SimpleNamespace(train_pairs=SimpleNamespace(longest=lambda: (96, 32)), global_batch_size=8)
        trainer = SimpleNamespace(strategy=strategy, world_size=1, datamodule=data)
        said = []
        monkeypatch.setattr(module, "rank_zero_info", said.append)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), 2**40))
        saved = module.SaveRunConfig(None, config)
        saved.setup(trainer, PreferenceModule(policy, **options), "fit")
        return policy.gradient_checkpointing, given.gradient_checkpointing, said

    return run


def test_recomputed_where_a_step_would_not_fit(decided, folder):
    policy = PolicyModel(folder, rank=8)
    whole, part = (step_bytes(policy, pairs, 96, 32, devices=1) for pairs in (8, 2))
    assert part < 0.5 * whole
    for options, needed in (({}, whole), ({"micro_batch_size": 2}, part)):
        fits, short = (needed / module.FREE * factor for factor in (1.01, 0.99))
        assert decided(fits, **options)[:2] == (False, False)
        checkpointed, written, said = decided(short, **options)
        assert checkpointed and written
        assert said == [
            "gradient_checkpointing auto is true: without it a step takes some 0.0 GiB, and 0.0 GiB of the "
            "GPU are free."
        ]


def test_what_it_leaves_alone(decided):
    """What was asked for, and a CPU."""
    for options in ({"asked": True}, {"device": torch.device("cpu")}):
        checkpointed, written, said = decided(1e12, **options)
        assert checkpointed and written == options.get("asked", "auto") and not said


def test_recomputed_where_the_estimate_does_not_count(decided, monkeypatch):
    """Parts of a model, and attention's scores."""
    monkeypatch.setattr(DeepSpeedStrategy, "root_device", GPU)
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    for options, name in (({"strategy": strategy}, "DeepSpeed"), ({"attention": "eager"}, "eager attention")):
        checkpointed, written, said = decided(1e12, **options)
        assert checkpointed and written is True and f"with {name} is not estimated" in said[0]
