"""A probe's states without the layers above the middle."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pacmr_lightning.policy.middle_states import middle_states


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral", "mamba"])
def test_equal_to_a_whole_pass(kind):
    small = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 64, "pad_token_id": 0}
    if kind == "gpt2":
        small = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 64}
    elif kind != "mamba":
        small |= {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small)).eval()
    inputs = {"input_ids": torch.randint(1, 64, (2, 7))}
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)
    with torch.no_grad():
        states = model.base_model(**inputs, output_hidden_states=True).hidden_states
        truth = states[1 if kind == "mamba" else 2]  # Mamba's list begins after the first layer
        hooks = dict(layers[1]._forward_hooks)
        layers[2].forward = lambda *_, **__: pytest.fail("the last layer ran")
        assert torch.equal(middle_states(model, inputs), truth)
    assert dict(layers[1]._forward_hooks) == hooks, "nothing is left behind"
