"""Estimates how much memory a run needs on each device, by strategy; no weights, no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from ..command_line.parser import run_tool
from ..errors import UserError
from ..policy.quantized import AskedQuantization
from ..runs.memory_estimate import Held, activation_bytes, build, four_bit_base, held

GIB = 2**30
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
) -> dict[str, dict[int, Held]]:
    """Prints what each device holds at the peak of a step, in GiB; an estimate, of which parts are exact.

    Counts of parameters, of AdamW's state and of gradients are exact. Activations are those of transformers'
    own code at these lengths, attention as a kernel that keeps no scores. Not counted: the CUDA context
    (about 0.5 GiB), NCCL's buffers and what an allocator wastes; leave a tenth free.

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

    Returns:
        What is held, by strategy and number of processes.

    Raises:
        UserError: an option is out of its range, or the model is not known.
    """
    devices = devices or [1, 4, 8]
    numbers = {
        "rank": rank,
        "micro_batch_size": micro_batch_size,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "logit_chunk": logit_chunk,
        "devices": min(devices),
    }
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"{name} is {value}, but it must be at least 1.")
    policy = build(_config(model), rank, target_modules, getattr(torch, dtype))
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
    options: dict[str, Any] = {"activations": activations, "vnet": vnet, "base": base}
    found = {
        name: {n: held(policy, devices=n, **options, **kind) for n in devices}
        for name, kind in strategies.items()
    }
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in policy.parameters()) - trained
    console = Console()
    console.width = max(console.width, 120)  # a narrower table would be cut, where a line only wraps
    console.print(f"{model}: {frozen:,} parameters in {stored}, adapter of {trained:,} in float32.")
    console.print(_table(found))
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
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"The configuration of {model} cannot be read: {first}") from None


def main(arguments: list[str]) -> None:
    """``pacmr memory``."""
    run_tool("memory", memory, arguments)
