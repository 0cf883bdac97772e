"""Estimates how much memory a run needs on each device, and how long it takes; no weights, no GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from ..audit.own_pull import SAMPLE
from ..command_line.parser import run_tool
from ..errors import UserError
from ..meta_gradient.step_pairs import affordable, kept_inputs
from ..policy.base_model import adapter_chain
from ..policy.lora import lora_linears
from ..policy.quantized import AskedQuantization
from ..runs.memory_estimate import FP32, GIB, Held, activation_bytes, build, four_bit_base, held
from ..runs.time_estimate import Plan, pair_flops
from ..runs.training_cost import Speed, check, times

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero2_offload": {"stage": 2, "offload_optimizer": True},
    "zero3": {"stage": 3},
    "zero3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}
"""Files of configs/strategies, and what they mean for ``memory.held``."""


def memory(
    model: str = "llama-2-7b",
    rank: int = 16,
    target_modules: str | list[str] = "all-linear",
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    gradient_checkpointing: bool = True,
    layout: Literal["shared", "separate"] = "shared",
    micro_batch_size: int = 4,
    prompt_tokens: int = 640,
    response_tokens: int = 128,
    logit_chunk: int = 512,
    vnet: bool = True,
    devices: list[int] | None = None,
    quantization: AskedQuantization | None = None,
    pairs: int | None = None,
    global_batch_size: int = 32,
    every: int = 10,
    meta_batch_size: int = 64,
    coverage: float = 1.0,
    reference: Literal["live", "cached"] = "cached",
    validation_pairs: int = 0,
    validations: int = 4,
    device_tflops: float | None = None,
    utilization: float | None = None,
    gpu_hour: float | None = None,
) -> dict[str, dict[int, Held]]:
    """Prints what each device holds at the peak of a step, in GiB, and how many operations a run takes.

    Counts of parameters, of AdamW's state and of gradients are exact. Activations are those of transformers'
    own code at these lengths, attention as a kernel that keeps no scores. Not counted: the CUDA context
    (about 0.5 GiB), NCCL's buffers and what an allocator wastes; leave a tenth free.

    Operations are those of all matrix products of the same code, activations that are computed again and
    masked attention included. Not counted: generated responses, padding, what is no product. Hours are these
    operations at the speed that you say; lengths for memory are the longest, for hours the mean.

    Args:
        model: folder or Hub id of a model, of which the configuration alone is read; or llama-2-7b, whose
            shape is known.
        rank: LoRA rank.
        target_modules: linear layers with an adapter, as the policy's.
        dtype: of the frozen base.
        gradient_checkpointing: as the policy's.
        layout: "shared" computes a prompt once for both responses, "separate" twice.
        micro_batch_size: pairs in one forward pass.
        prompt_tokens: of every prompt.
        response_tokens: of every response; with ``prompt_tokens``, ``max_length``.
        logit_chunk: as the policy's.
        vnet: whether weights are learned (PACMR-DPO, MWN-DPO).
        devices: numbers of processes, 1, 4 and 8 by default.
        quantization: as the policy's, "4bit" or null; DeepSpeed's strategies, which refuse it, are left out.
        pairs: training pairs, of one epoch; with it, operations of the whole run are shown.
        global_batch_size: pairs of an update, over all devices.
        every: updates of the policy to one of VNet.
        meta_batch_size: pairs of VNet's update, over all devices.
        coverage: share of them that pass the threshold (``meta/coverage`` of a run); 1 is the most.
        reference: as the data's, "cached" once or "live" with each batch.
        validation_pairs: of one validation.
        validations: in the run; four with the shipped configs.
        device_tflops: peak of one device in TFLOP/s at the dtype, as its data sheet says (dense).
        utilization: share of that peak at which you expect the counted operations to run, above 0 and at most
            1; without it hours for 20% and 50% are shown.
        gpu_hour: price of an hour of one device, in any currency.

    Returns:
        What is held, by strategy and number of processes.

    Raises:
        UserError: an option is out of its range, or the model is not known.
    """
    model = str(model)
    devices = devices or [1, 4, 8]
    numbers = {
        "rank": rank,
        "micro_batch_size": micro_batch_size,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "logit_chunk": logit_chunk,
        "devices": min(devices),
        "global_batch_size": global_batch_size,
        "every": every,
        "meta_batch_size": meta_batch_size,
    }
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"{name} is {value}, but it must be at least 1.")
    plan = Plan(
        global_batch_size,
        every,
        meta_batch_size,
        coverage,
        reference == "cached",
        pairs,
        validation_pairs,
        validations,
        SAMPLE,
    )
    speed = Speed(device_tflops, utilization, gpu_hour)
    check(plan, speed)
    policy = build(_config(model), rank, target_modules, getattr(torch, dtype))
    # While the parameters are on the meta device: activation_bytes puts fake ones in their place.
    flops = pair_flops(
        policy,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        shared=layout == "shared",
        gradient_checkpointing=gradient_checkpointing,
    )
    activations = activation_bytes(
        policy,
        pairs=micro_batch_size,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        shared=layout == "shared",
        gradient_checkpointing=gradient_checkpointing,
        logit_chunk=logit_chunk,
    )
    base, strategies = None, STRATEGIES
    stored: str = dtype
    if quantization:
        base, largest = four_bit_base(_config(model), getattr(torch, dtype))
        # One weight at a time is unpacked for its products.
        activations += largest
        stored = f"{quantization}, computed in {dtype}"
        strategies = {"ddp": STRATEGIES["ddp"]}
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in policy.parameters()) - trained
    stays = sum(p.numel() * p.element_size() for p in policy.parameters())
    stays = stays if base is None else base + FP32 * trained
    if not gradient_checkpointing:
        tokens = micro_batch_size * (prompt_tokens + 2 * response_tokens)
        stays += kept_inputs(lora_linears(policy), tokens)
    shares = {n: math.ceil(global_batch_size / n) for n in devices}
    kept = {n: share if affordable(share, trained, stays) else 0 for n, share in shares.items()}
    options: dict[str, Any] = {"activations": activations, "vnet": vnet, "base": base}
    found = {
        name: {
            n: held(policy, devices=n, **options, **kind, kept=kept[n] if kind["stage"] < 3 else 0)
            for n in devices
        }
        for name, kind in strategies.items()
    }
    console = Console()
    console.width = max(console.width, 120)  # a narrower table would be cut, where a line only wraps
    console.print(f"{model}: {frozen:,} parameters in {stored}, adapter of {trained:,} in float32.")
    console.print(_table(found))
    per_pair = [f"{value / 1e12:.3g}" for value in (flops.reference, flops.forward, flops.gradient)]
    console.print(
        f"One pair of {prompt_tokens} + 2 x {response_tokens} tokens: {per_pair[0]} TFLOP forward in the "
        f"reference, {per_pair[1]} in the policy, {per_pair[2]} with its gradient."
    )
    console.print(times(flops, plan, speed, kept, vnet))
    return found


def _table(found: dict[str, dict[int, Held]]) -> Table:
    table = Table(box=SIMPLE_HEAD, caption="GiB on each device; host: in the memory of one machine")
    columns = [name for name in vars(next(iter(found["ddp"].values()))) if name != "host"]
    for name in ("strategy", "devices", *columns, "total", "host"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for strategy, by_devices in found.items():
        for n, parts in by_devices.items():
            values = [*(getattr(parts, name) for name in columns), parts.device, parts.host]
            table.add_row(strategy, str(n), *(f"{value / GIB:.1f}" if value else "-" for value in values))
    return table


def _config(model: str) -> PretrainedConfig:
    if model == "llama-2-7b":
        return LlamaConfig()  # its defaults are this model's
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise UserError(f"The model folder {model} does not exist; name one, a Hub id, or llama-2-7b.")
    try:
        return AutoConfig.from_pretrained(adapter_chain(model)[-1])
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"The configuration of {model} cannot be read: {first}") from None


def main(arguments: list[str]) -> None:
    """``pacmr memory``."""
    run_tool("memory", memory, arguments)
