"""The memory estimate against real tensors: their sizes, and what torch's allocator reports."""

import re

import pytest
import torch
from torch.profiler import profile
from transformers import AutoModelForCausalLM, LlamaConfig

from pacmr_lightning import cli
from pacmr_lightning.batch import PairBatch
from pacmr_lightning.meta_gradient import step_pairs
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.runs import memory_estimate as module
from pacmr_lightning.runs.memory_estimate import FREE, activation_bytes, build, decided, held

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
@pytest.mark.parametrize(
    ("dtype", "lora"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "base")]
)
def test_activations(folder, shared, gradient_checkpointing, dtype, lora):
    options = {"gradient_checkpointing": gradient_checkpointing, "logit_chunk": CHUNK}
    layout = "shared" if shared else "separate"
    policy = PolicyModel(folder, rank=8, dtype=dtype, layout=layout, lora_compute_dtype=lora, **options)
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
    built = build(LlamaConfig(**CONFIG), 8, "all-linear", getattr(torch, dtype), lora)
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
    # Two micro-batches', their sum, the virtual step, and the moved adapter of an fp32 base.
    assert found.gradients == 5 * size(p.grad for p in policy.adapter().values())
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


@pytest.mark.parametrize(
    ("gradient_checkpointing", "shape"),
    [(True, (8, 100, 40)), (False, (8, 100, 40)), (True, (1, 6, 3))],
)
def test_few_layers_stand_for_many(gradient_checkpointing, shape, monkeypatch):
    """Bytes of 6 equal layers from 2 and 4; unequal ones are all counted."""
    sizes = dict(zip(("pairs", "prompt_tokens", "response_tokens"), shape, strict=True))
    options = {"shared": True, "gradient_checkpointing": gradient_checkpointing, "logit_chunk": CHUNK}

    def counted(unequal: bool) -> tuple[int, int]:
        model = build(LlamaConfig(**{**CONFIG, "num_hidden_layers": 6}), 8, "all-linear", torch.float32)
        if unequal:
            model.get_base_model().model.layers[4].mlp.up_proj.lora_A.requires_grad_(False)
        passes = []
        whole = module.LiveBytes.__enter__
        with monkeypatch.context() as patch:
            patch.setattr(module.LiveBytes, "__enter__", lambda self: passes.append(self) or whole(self))
            return activation_bytes(model, **sizes, **options), len(passes)

    few, passes = counted(False)
    assert passes == 2 and counted(True)[1] == 1
    monkeypatch.setattr(module, "COUNTED", (2, 6))
    assert counted(False) == (few, 1)


def test_decisions_by_what_is_free():
    """Activations first, then single pairs' gradients, which ZeRO-3 and DPO keep none of."""
    policy = build(LlamaConfig(**CONFIG), 8, "all-linear", torch.bfloat16)
    activations, one = {True: 1e9, False: 9e9}, held(policy, 0, 1, 0.0)

    def run(free: float, stage=0, pairs=1000, **options):
        found, *decisions = decided(policy, stage, 1, activations, pairs, free, **options)
        assert found.gradients == held(policy, stage, 1, 0.0, kept=decisions[1], **options).gradients
        return decisions

    whole = 9e9 + one.device
    assert [run(whole / FREE + more)[0] for more in (1e6, -1e6)] == [False, True]
    needed = 1000 * one.adapter
    assert needed > step_pairs.SMALL
    only = {"activations": {True: 1e9}}
    for left, kept in ((1.01 * needed / step_pairs.FREE, 1000), (0.99 * needed / step_pairs.FREE, 0)):
        free = 1e9 + one.device + left
        assert decided(policy, 0, 1, **only, pairs=1000, free=free)[1:] == (True, kept)
    assert run(1e12, stage=3)[1] == run(1e12, vnet=False)[1] == 0


def test_the_command(folder, capsys):
    cli.main(["memory", "--model", folder, "--rank", "4", "--devices", "[1, 2]"])
    text = capsys.readouterr().out
    assert "zero3_offload" in text and len(re.findall(r"^ *ddp +\d", text, re.MULTILINE)) == 2
    assert "not measured on a GPU" in " ".join(text.split())
    # PEFT's own count for Llama-2-7B, which many model cards have.
    cli.main(["memory", "--gradient_checkpointing", "false"])
    assert "6,738,415,616 parameters in bfloat16, adapter of 39,976,960" in capsys.readouterr().out
