"""Estimates of a run's memory on each device, and of its operations and hours; no weights, no GPU."""

import math
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..command_line.output import print_result
from ..errors import UserError, check_at_least, check_within
from ..policy.mixed_precision_lora import LoraDtype
from ..policy.quantized import AskedQuantization
from ..runs.memory_estimate import (
    GIB,
    GPU_FREE,
    DeviceMemory,
    activation_bytes,
    build,
    decided,
    four_bit_base,
    model_config,
)
from ..runs.time_estimate import PairFlops, Plan, audit_flops, pair_flops, run_flops, update_flops

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero2_offload": {"stage": 2, "offload_optimizer": True},
    "zero3": {"stage": 3},
    "zero3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}
"""Files of configs/strategies as arguments of ``memory_estimate.held``."""
MEASURED = (0.18, 0.35)
"""Parts of an H100's 989 TFLOP/s in updates of DPO with 1.5B and 7B parameters (docs/performance.md)."""


def memory(
    model: str = "llama-2-7b",
    rank: int = 16,
    target_modules: str | list[str] = "all-linear",
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    gradient_checkpointing: bool | Literal["auto"] = "auto",
    device_memory: float = GPU_FREE,
    layout: Literal["shared", "separate"] = "shared",
    micro_batch_size: int = 4,
    prompt_tokens: int = 640,
    response_tokens: int = 128,
    logit_chunk: int = 512,
    vnet: bool = True,
    devices: list[int] | None = None,
    quantization: AskedQuantization | None = None,
    lora_compute_dtype: LoraDtype = "base",
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
) -> dict[str, dict[int, DeviceMemory]]:
    """Estimates peak memory per device in GiB, and the operations of a run.

    Parameters, AdamW's state and gradients are exact; activations are those of transformers' code, with
    attention that stores no scores. Leave a tenth free for the CUDA context (about 0.5 GiB), NCCL and the
    allocator. Operations are all matrix products of the same code, without generated responses and padding.
    Give the longest lengths for memory, and mean lengths for hours.

    Args:
        model: folder or Hub id of a model, of which only the configuration is read; or llama-2-7b.
        rank: LoRA rank.
        target_modules: linear layers with an adapter.
        dtype: dtype of the frozen base.
        gradient_checkpointing: recompute activations in backward; "auto" decides by ``device_memory``.
        device_memory: free GiB per device before the run, 78 on an H100 or A100 of 80 GB; it also decides
            whether VNet's update keeps per-pair gradients.
        layout: "shared" computes a prompt once for both responses ("packed_shared", too), "separate" twice.
        micro_batch_size: pairs in one forward pass; with ``micro_batch_tokens``, as many as fit its tokens.
        prompt_tokens: tokens of each prompt.
        response_tokens: tokens of each response.
        logit_chunk: positions whose logits are computed at a time.
        vnet: learned weights (PACMR-DPO, MWN-DPO).
        devices: numbers of processes; default: 1, 4 and 8.
        quantization: "4bit" or null; 4 bits exclude DeepSpeed's strategies.
        lora_compute_dtype: "base" keeps LoRA's inputs for backward in the base's dtype.
        pairs: training pairs of one epoch; shows the operations of the whole run.
        global_batch_size: pairs per update, over all devices.
        every: policy updates per VNet update.
        meta_batch_size: pairs of a meta-batch, over all devices.
        coverage: fraction of a meta-batch that passes the threshold (``meta/coverage`` of a run).
        reference: "cached" runs the reference once, "live" with each batch.
        validation_pairs: pairs per validation.
        validations: validations of the run; four with the shipped configs.
        device_tflops: peak of one device in TFLOP/s at the dtype (dense, from its data sheet).
        utilization: expected fraction of that peak, above 0 and at most 1; default: 18% and 35%, as measured
            on an H100 in updates of DPO with 1.5B and 7B parameters.
        gpu_hour: price of an hour of one device, in any currency.

    Raises:
        UserError: an option is out of range, or the model cannot be read.
    """
    from ..audit.own_pull import SAMPLE  # slow import

    model = str(model)
    devices = devices or [1, 4, 8]
    check_at_least(1, rank=rank, micro_batch_size=micro_batch_size, prompt_tokens=prompt_tokens)
    check_at_least(1, response_tokens=response_tokens, logit_chunk=logit_chunk, devices=min(devices))
    check_at_least(1, global_batch_size=global_batch_size, every=every, meta_batch_size=meta_batch_size)
    check_at_least(0, validation_pairs=validation_pairs, validations=validations)
    check_within("(0, inf)", " (GiB)", device_memory=device_memory)
    _check_speed(device_tflops, utilization, gpu_hour, pairs)
    if pairs is not None and pairs < global_batch_size:
        raise UserError(
            f"pairs is {pairs}, fewer than one batch of {global_batch_size}; give more pairs or lower "
            "global_batch_size."
        )
    check_within("[0, 1]", coverage=coverage)
    cached = reference == "cached"
    batches = (global_batch_size, every, meta_batch_size)
    plan = Plan(*batches, coverage, cached, pairs, validation_pairs, validations, SAMPLE)
    lengths: dict[str, Any] = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens}
    flops: dict[bool, PairFlops] = {}
    activations: dict[bool, float] = {}
    for recomputed in (False, True) if gradient_checkpointing == "auto" else (gradient_checkpointing,):
        policy = build(model_config(model), rank, target_modules, getattr(torch, dtype), lora_compute_dtype)
        computed = {"shared": layout == "shared", "gradient_checkpointing": recomputed}
        # Before activation_bytes, which replaces the parameters on the meta device by fake ones.
        flops[recomputed] = pair_flops(policy, **lengths, **computed)
        activations[recomputed] = activation_bytes(
            policy, pairs=micro_batch_size, **lengths, **computed, logit_chunk=logit_chunk
        )
    base, strategies = None, STRATEGIES
    stored: str = dtype
    if quantization:
        base, largest = four_bit_base(model_config(model), getattr(torch, dtype))
        # One weight at a time is unpacked.
        activations = {recomputed: size + largest for recomputed, size in activations.items()}
        stored = f"{quantization}, computed in {dtype}"
        strategies = {"ddp": STRATEGIES["ddp"]}
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in policy.parameters()) - trained

    def step(n: int, stage: Literal[0, 1, 2, 3], **options: Any) -> tuple[DeviceMemory, bool, int]:
        share, free = math.ceil(global_batch_size / n), device_memory * GIB
        return decided(policy, stage, n, activations, share, free, vnet=vnet, base=base, **options)

    found = {name: {n: step(n, **kind) for n in devices} for name, kind in strategies.items()}
    print_result(f"{model}: {frozen:,} parameters in {stored}, adapter of {trained:,} in float32.")
    print_result(_table(found, device_memory, vnet), width=130)  # a narrower table would be cut
    first = next(iter(flops.values()))
    gradients = " or ".join(
        f"{each.gradient / 1e12:.3g} with its gradient" + ", recomputed" * each.recomputed
        for each in flops.values()
    )
    print_result(
        f"One pair of {prompt_tokens} + 2 x {response_tokens} tokens: {first.reference / 1e12:.3g} TFLOP "
        f"forward in the reference, {first.forward / 1e12:.3g} in the policy, {gradients}."
    )
    taken = {n: (flops[recomputed], bool(kept)) for n, (_, recomputed, kept) in found["ddp"].items()}
    print_result(_costs(taken, plan, vnet, device_tflops, utilization, gpu_hour), width=120)
    return {name: {n: parts for n, (parts, *_) in of.items()} for name, of in found.items()}


def _check_speed(
    tflops: float | None, utilization: float | None, price: float | None, pairs: int | None
) -> None:
    check_within("(0, inf)", device_tflops=tflops, gpu_hour=price)
    check_within("(0, 1]", " (0.4 is 40%)", utilization=utilization)
    for name, value in {"utilization": utilization, "gpu_hour": price}.items():
        if value is not None and tflops is None:
            raise UserError(
                f"{name} is {value}, but device_tflops is not given; add the peak of one device, 989 for an "
                "H100 SXM in bfloat16."
            )
    if price is not None and pairs is None:
        raise UserError(f"gpu_hour is {price}, but pairs is not given; add the number of pairs.")


def _costs(
    flops: dict[int, tuple[PairFlops, bool]],
    plan: Plan,
    vnet: bool,
    tflops: float | None,
    utilization: float | None,
    price: float | None,
) -> Table:
    shares = () if tflops is None else MEASURED if utilization is None else (utilization,)
    caption = (
        "PFLOP: 1e15 operations, over all devices, with ddp's decisions: counted on shapes without data, not "
        "measured."
    )
    if shares:
        at = " and ".join(f"{100 * share:.3g}%" for share in shares)
        measured = "as measured on an H100 in updates of DPO with 1.5B and 7B parameters"
        whose = "which you gave" if utilization is not None else measured
        caption += f" Time: calculated for {at} of {tflops:g} TFLOP/s, {whose}."
    table = Table(box=SIMPLE_HEAD, caption=caption)
    whole = plan.pairs is not None
    methods: dict[str, tuple[str | None, int]] = {"DPO": (None, 1)}
    if whole:
        methods["DPO, audit, second pass"] = (None, 2)
    if vnet:
        for estimator in ("GhostDotProduct", "CentralDifference"):
            methods[f"PACMR-DPO, {estimator}"] = (estimator, 1)
    for method, (learned, fits) in methods.items():
        for n, (pair, kept) in flops.items():
            update = update_flops(pair, plan, learned, kept)
            total = run_flops(pair, plan, update, learned is not None, fits)
            alone = audit_flops(pair, plan) if fits > 1 else 0
            row = {"method": method, "devices": str(n), "PFLOP per update": f"{update / 1e15:.3g}"}
            if whole:
                row |= {
                    "updates": f"{fits * plan.updates:,}",
                    "PFLOP in total": f"{(total + alone) / 1e15:,.4g}",
                }
            for share in shares:
                rate = (tflops or 0) * 1e12 * share
                hours = (total / n + alone) / rate / 3600
                at = f"{100 * share:.3g}%"
                row[f"s per update, {at}"] = f"{update / n / rate:.3g}"
                if whole:
                    row[f"hours, {at}"] = f"{hours:.1f}"
                if price is not None:
                    row[f"price, {at}"] = f"{hours * n * price:,.2f}"
            if not table.columns:
                for name in row:
                    table.add_column(name, justify="left" if name == "method" else "right")
            table.add_row(*row.values())
    return table


def _table(
    found: dict[str, dict[int, tuple[DeviceMemory, bool, int]]], device_memory: float, vnet: bool
) -> Table:
    caption = (
        f"GiB on each device of {device_memory:g}; host: in the memory of one machine. Calculated. On one "
        "H100 updates of DPO with 1.5B and 7B parameters took 2% to 20% more; DeepSpeed and 4 bits were not "
        "measured on a GPU."
    )
    table = Table(box=SIMPLE_HEAD, caption=caption, pad_edge=False, padding=(0, 1, 0, 0))
    columns = [name for name in vars(next(iter(found["ddp"].values()))[0]) if name != "host"]
    decisions = ("recomputed", *(["pairs kept"] if vnet else []))
    for name in ("strategy", "devices", *columns, "total", "host", *decisions):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for strategy, by_devices in found.items():
        for n, (parts, recomputed, kept) in by_devices.items():
            values = [*(getattr(parts, name) for name in columns), parts.device, parts.host]
            said = ["yes" if recomputed else "no", *([str(kept or "-")] if vnet else [])]
            sizes = (f"{value / GIB:.1f}" if value else "-" for value in values)
            table.add_row(strategy, str(n), *sizes, *said)
    return table
