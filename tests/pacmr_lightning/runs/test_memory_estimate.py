"""The memory estimate against real tensors: their sizes, and what torch's allocator reports."""

import pytest
import torch
from torch.profiler import profile
from transformers import AutoModelForCausalLM, LlamaConfig

from pacmr_lightning import cli
from pacmr_lightning.batch import PairBatch
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.runs.memory_estimate import activation_bytes, build, held

CONFIG = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PAIRS, PROMPT, RESPONSE, CHUNK = 4, 96, 32, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(path)
    return str(path)


def peak_of_allocations(run) -> int:
    """The most bytes that were allocated during ``run``, over those before it, as the allocator saw them."""
    with profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("gradient_checkpointing", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations(folder, shared, gradient_checkpointing, dtype):
    options = {"gradient_checkpointing": gradient_checkpointing, "logit_chunk": CHUNK}
    layout = "shared" if shared else "separate"
    policy = PolicyModel(folder, rank=8, dtype=dtype, layout=layout, **options)
    policy.build()
    generator = torch.Generator().manual_seed(0)

    def words(length):
        return torch.randint(3, 1024, (PAIRS, length), generator=generator).tolist()

    batch = PairBatch.collate(list("abcd"), words(PROMPT), words(RESPONSE), words(RESPONSE))

    def run():
        found = policy.log_probs_in(layout, batch)
        torch.autograd.grad((found.chosen - found.rejected).sum(), list(policy.adapter().values()))

    run()
    real = peak_of_allocations(run)
    sizes = {"pairs": PAIRS, "prompt_tokens": PROMPT, "response_tokens": RESPONSE, "shared": shared}
    built = build(LlamaConfig(**CONFIG), 8, "all-linear", getattr(torch, dtype))
    assert 0.9 * real < activation_bytes(built, **sizes, **options) < 1.25 * real


def test_parameters_and_optimizer(folder):
    policy = PolicyModel(folder, rank=8)
    policy.build()
    optimizer = torch.optim.AdamW(policy.adapter().values())
    for parameter in policy.adapter().values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    found = held(build(LlamaConfig(**CONFIG), 8, "all-linear", torch.float32), 0, 1, 0.0)
    assert found.base == size(p for p in policy.parameters() if not p.requires_grad)
    assert found.adapter == size(policy.adapter().values())
    assert found.gradients == 4 * size(p.grad for p in policy.adapter().values())
    assert found.optimizer == size(v for s in optimizer.state.values() for k, v in s.items() if k != "step")


def test_what_the_stages_share_out():
    """Eight devices hold together what one does, of what a stage cuts into parts."""
    policy = build(LlamaConfig(**CONFIG), 8, "all-linear", torch.bfloat16)
    one = held(policy, 0, 1, 0.0)
    for stage in (1, 2, 3):
        many = held(policy, stage, 8, 0.0)
        assert 8 * many.optimizer == one.optimizer
        assert many.base == (one.base / 8 if stage == 3 else one.base)
    on_host = held(policy, 3, 8, 0.0, offload_optimizer=True, offload_parameters=True)
    assert on_host.base == on_host.optimizer == 0 and on_host.host > one.base + one.optimizer


def test_the_command(folder, capsys):
    cli.main(["memory", "--model", folder, "--rank", "4", "--devices", "[1, 2]"])
    text = capsys.readouterr().out
    assert "zero3_offload" in text and text.count("ddp") == 2
    # PEFT's own count for Llama-2-7B, which many model cards have.
    cli.main(["memory", "--gradient_checkpointing", "false"])
    assert "6,738,415,616 parameters in bfloat16, adapter of 39,976,960" in capsys.readouterr().out
