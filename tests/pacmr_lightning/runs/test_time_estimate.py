"""Counted operations against sums written out layer by layer, and against real steps of a tiny Llama."""

import contextlib
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from pacmr_lightning import cli
from pacmr_lightning.batch import PairBatch
from pacmr_lightning.commands.memory import memory
from pacmr_lightning.meta_gradient import (
    CentralDifference,
    GhostDotProduct,
    PromptAugmentationConsistency,
    virtual_step,
)
from pacmr_lightning.meta_gradient.step_pairs import KeptStepPairs, RecomputedStepPairs
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.runs.memory_estimate import build
from pacmr_lightning.runs.time_estimate import (
    PairFlops,
    Plan,
    audit_flops,
    pair_flops,
    run_flops,
    update_flops,
)
from pacmr_lightning.weighting import VNetWeighting
from pacmr_lightning.weighting.weighted_gradient import weighted_gradient

from ...conftest import fails

WIDTH, HIDDEN, LAYERS, HEADS, KEYS, WORDS, RANK = 64, 96, 2, 4, 2, 128, 4
SHAPE = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
CONFIG = LlamaConfig(**SHAPE, num_attention_heads=HEADS, num_key_value_heads=KEYS)
PROMPT, RESPONSE, PAIRS = 24, 8, 4
KINDS = (RecomputedStepPairs, KeptStepPairs)


def counted(shared: bool, gradient_checkpointing: bool = True, *numbers) -> PairFlops:
    policy = build(CONFIG, RANK, "all-linear", *(numbers or (torch.float32,)))
    options = {"shared": shared, "gradient_checkpointing": gradient_checkpointing}
    return pair_flops(policy, prompt_tokens=PROMPT, response_tokens=RESPONSE, **options)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_layer_by_layer(shared, gradient_checkpointing):
    """2 operations a weight and token: forward, in the input's gradient, in its own where it is LoRA's."""
    narrow = WIDTH * KEYS // HEADS
    queries_keys_values = [(WIDTH, WIDTH), (WIDTH, narrow), (WIDTH, narrow)]
    sizes = [*queries_keys_values, (WIDTH, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    rows, length = (1, PROMPT + 2 * RESPONSE) if shared else (2, PROMPT + RESPONSE)
    per_weight = 2 * rows * length
    base = per_weight * LAYERS * sum(i * o for i, o in sizes)
    lora = per_weight * LAYERS * sum(RANK * (i + o) for i, o in sizes)
    attention = LAYERS * rows * 2 * (2 * length**2 * WIDTH)  # scores, and the sum of values
    head = 2 * (2 * RESPONSE) * WIDTH * WORDS
    # Embeddings are frozen, so nobody asks the first layer for the gradient of what it gets.
    first_base = per_weight * sum(i * o for i, o in queries_keys_values)
    first_lora = per_weight * sum(RANK * i for i, _ in queries_keys_values)

    found = counted(shared, gradient_checkpointing)
    # Older releases of transformers take the angles of rotary positions as a matrix product, 8 to a position.
    angles = found.reference - (base + attention + head)
    assert angles in (0, 2 * rows * length * WIDTH // HEADS // 2)
    assert found.forward == base + lora + attention + head + angles
    backward = (base - first_base) + (2 * lora - first_lora) + 2 * attention + head
    if gradient_checkpointing:
        # A layer is repeated until all that backward needs is there: without its last product, LoRA's B.
        backward += base + lora + attention - LAYERS * per_weight * RANK * WIDTH
    assert found.gradient == found.forward + backward
    # LoRA in bf16 has the same products, but none that a repeated layer leaves out.
    half = counted(shared, gradient_checkpointing, torch.bfloat16, "base")
    assert half.forward == found.forward
    assert half.gradient > found.gradient if gradient_checkpointing else half.gradient == found.gradient


class _NoModules(contextlib.nullcontext):
    """In the place of the counter's hooks on modules, which cannot bear a gradient taken inside of one."""

    parents = ("Global",)


def real(run) -> int:
    """Operations of a run on real tensors, attention as its plain products."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()
    with sdpa_kernel(SDPBackend.MATH), counter:
        run()
    return counter.get_total_flops()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(path)
    return str(path)


@pytest.fixture
def policy(folder, request):
    """Away from its reference, so that there is something to learn."""
    layout = getattr(request, "param", "shared")
    policy = PolicyModel(folder, rank=RANK, layout=layout, gradient_checkpointing=True)
    policy.build()
    with torch.no_grad():
        for parameter in policy.adapter().values():
            parameter.normal_(0, 0.02)
    return policy


def pairs_of(policy, seed=0) -> PairBatch:
    generator = torch.Generator().manual_seed(seed)

    def words(length):
        return torch.randint(3, WORDS, (PAIRS, length), generator=generator).tolist()

    batch = PairBatch.collate(list("abcd"), words(PROMPT), words(RESPONSE), words(RESPONSE))
    return batch.with_reference(policy.reference_log_probs(batch))


@pytest.mark.parametrize("policy", ["shared", "separate"], indirect=True)
def test_real_passes(policy):
    batch = pairs_of(policy)
    live = replace(batch, reference=None)
    parameters = list(policy.adapter().values())

    def gradient():
        found = policy.log_probs(batch)
        torch.autograd.grad((found.chosen - found.rejected).sum(), parameters)

    flops = counted(policy.layout == "shared")
    assert real(lambda: policy.reference_log_probs(live)) == PAIRS * flops.reference
    with torch.no_grad():
        assert real(lambda: policy.log_probs(batch)) == PAIRS * flops.forward
    assert real(gradient) == PAIRS * flops.gradient


@pytest.mark.parametrize(
    ("kind", "estimator", "hooked"),
    [
        *((*case, False) for case in product(KINDS, (GhostDotProduct, CentralDifference))),
        # Hooks change the passes over the meta-batch, and those of the central difference over the pairs.
        (KeptStepPairs, GhostDotProduct, True),
        (RecomputedStepPairs, CentralDifference, True),
    ],
)
def test_a_real_update(policy, estimator, kind, hooked, monkeypatch):
    if hooked:
        monkeypatch.setattr(virtual_step, "swapped", virtual_step.hooked)
    batch = pairs_of(policy)
    meta = replace(batch, augmented=pairs_of(policy, seed=1))
    weighting = VNetWeighting(PromptAugmentationConsistency(tau=0.5), estimator())

    def step():
        pairs = kind(policy, DPO(0.1), batch, 2)
        weighting.update(pairs, meta, 1e-3, 1e-3)
        weighted_gradient(pairs, weighting)

    plan = Plan(global_batch_size=PAIRS, every=1, meta_batch_size=PAIRS)
    name, kept = estimator.__name__, kind is KeptStepPairs
    expected = update_flops(replace(counted(shared=True), hooked=hooked), plan, name, kept)
    # Beside it: VNet, kept gradients added up, and inputs of the first layer that need no gradient.
    assert real(step) == pytest.approx(expected, rel=0.01)
    assert weighting.updates == 1
    assert real(
        lambda: weighted_gradient(RecomputedStepPairs(policy, DPO(0.1), batch, 2), weighting)
    ) == pytest.approx(update_flops(counted(shared=True), plan, None), rel=1e-3)


FLOPS = PairFlops(reference=100, forward=110, gradient=300, recomputed=True, hooked=True)


def test_what_a_run_is_made_of():
    """By hand: 10 updates of 4 pairs, VNet at every fifth, 8 pairs in a meta-batch, half of which pass."""
    plan = Plan(4, 5, 8, 0.5, pairs=42, validation_pairs=10, validations=3, audit_sample=128)
    assert plan.updates == 10
    dpo = update_flops(FLOPS, plan, None)
    assert dpo == 4 * 300
    judged = 3 * 10 * (110 + 100)
    assert run_flops(FLOPS, plan, dpo) == 10 * dpo + judged + 42 * 100
    assert run_flops(FLOPS, plan, dpo, fits=2) == 2 * (10 * dpo + judged) + 42 * 100
    assert run_flops(FLOPS, plan, dpo, vnet=True) == 10 * dpo + judged + (42 + 2 * 8) * 100
    assert audit_flops(FLOPS, plan) == 42 * 110 + 42 * 300
    assert audit_flops(FLOPS, replace(plan, pairs=90_000)) == 90_000 * 110 + 128 * 300
    meta = 8 * (120 + 0.5 * 330)
    assert update_flops(FLOPS, plan, "GhostDotProduct", True) == dpo + meta / 5
    assert update_flops(FLOPS, plan, "GhostDotProduct") == dpo + (meta + 2 * 4 * 300) / 5
    assert update_flops(FLOPS, plan, "CentralDifference") == dpo + (meta + 4 * 300 + 2 * 4 * 120) / 5
    assert update_flops(FLOPS, plan, "CentralDifference", True) == dpo + (meta + 2 * 4 * 120) / 5
    swapped = replace(FLOPS, hooked=False)
    assert update_flops(swapped, plan, "GhostDotProduct", True) == dpo + 8 * (110 + 0.5 * 300) / 5
    live = replace(plan, cached=False)
    assert update_flops(FLOPS, live, None) == 4 * 400
    assert update_flops(FLOPS, live, "GhostDotProduct", True) == 4 * 400 + (meta + 8 * 1.5 * 100) / 5
    assert run_flops(FLOPS, live, 1600) == 10 * 1600 + judged
    assert run_flops(FLOPS, live, 1600, fits=2) == 2 * judged + 10 * 1600 + 10 * 1200
    assert audit_flops(FLOPS, live) == 42 * 210 + 42 * 300


OPTIONS = [
    *("--prompt_tokens", "24", "--response_tokens", "8", "--rank", "4", "--devices", "[1, 4]"),
    *("--pairs", "3200000000", "--device_tflops", "0.5"),
]


def test_hours_and_price(folder, capsys):
    """100,000,000 updates of 32 pairs on four devices, and the cache, at 0.2 TFLOP/s each."""
    more = "--utilization 0.4 --gpu_hour 10 --vnet false --gradient_checkpointing true"
    more += " --lora_compute_dtype float32"
    cli.main(["memory", "--model", folder, *OPTIONS, *more.split()])
    text = capsys.readouterr().out
    flops = counted(shared=True)
    hours = 3_200_000_000 * (flops.gradient + flops.reference) / 4 / 0.2e12 / 3600
    line = next(row for row in text.splitlines() if row.split()[:2] == ["DPO", "4"])
    assert line.split()[3:5] == ["100,000,000", f"{4 * hours * 3600 * 0.2e12 / 1e15:,.4g}"]
    assert line.split()[6:] == [f"{hours:.1f}", f"{4 * hours * 10:,.2f}"]
    assert " ".join(text.split()).count("40% of 0.5 TFLOP/s, which you gave") == 1
    assert "PACMR-DPO" not in text


def test_kept_gradients_and_example_hours(folder, capsys):
    """A small adapter's gradients are kept by pair on one device or four, but not under ZeRO-3."""
    options = {"prompt_tokens": 24, "response_tokens": 8, "devices": [1, 4], "device_tflops": 1e-3}
    found = memory(folder, rank=RANK, gradient_checkpointing=True, **options)
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("PACMR-DPO, GhostDotProduct") == 2
    assert "18% and 35% of 0.001 TFLOP/s, as measured on an H100 in updates of DPO" in text
    adapter = found["ddp"][1].adapter
    assert found["ddp"][1].gradients == (5 + 32) * adapter and found["ddp"][4].gradients == (5 + 8) * adapter
    assert found["zero3"][4].gradients == 5.25 * adapter


OUT_OF_RANGE = {"coverage": 1.1, "validations": -1, "every": 0, "rank": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device_tflops 989 --utilization 0", "utilization is 0.0, but"),
        ("--device_tflops 989 --utilization 1.5", "utilization is 1.5, but"),
        ("--utilization 0.4", "utilization is 0.4, but device_tflops is not given"),
        ("--device_tflops -1", "device_tflops is -1.0, but it must be above 0"),
        ("--device_tflops 989 --pairs 99 --gpu_hour -2", "gpu_hour is -2.0, but"),
        ("--device_tflops 989 --gpu_hour 2", "gpu_hour is 2.0, but pairs is not given"),
        *((f"--pairs {pairs}", f"pairs is {pairs}, fewer than one batch of 32") for pairs in (31, -64)),
        *((f"--{name} {value}", f"{name} is {value}") for name, value in OUT_OF_RANGE.items()),
        ("--devices [0]", "devices is 0"),
        ("--model ./nowhere", "./nowhere does not exist"),
        ("--layout wide", "layout"),
    ],
)
def test_bad_options(arguments, message, capsys):
    assert message in fails(capsys, ["memory", *arguments.split()])
