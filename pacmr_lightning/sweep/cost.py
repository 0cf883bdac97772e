"""Operations and GPU hours of a sweep's training, estimated as ``pacmr memory`` does."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..meta_gradient.step_pairs import affordable
from ..modules.preference import AUTO
from ..policy import PolicyModel
from ..runs.memory_estimate import (
    FREE,
    GIB,
    GPU_FREE,
    build,
    computes_prompt_once,
    model_config,
    step_bytes,
    ways_to_step,
)
from ..runs.time_estimate import PairFlops, Plan, pair_flops, run_flops, update_flops
from .cells import Cell
from .spec import Sweep, Workload


def training_flops(sweep: Sweep, left: Sequence[Cell], configs: Mapping[str, Any]) -> float:
    """Return operations of the cells, all devices together, with one cache of the reference for all.

    ``configs`` are parsed configurations of ``pacmr fit`` by ``Cell.variant``. Preparations, responses and
    commands before a fit are left out. Whether activations are recomputed, and single pairs' gradients kept,
    is decided as on GPUs of 80 GB, for pairs of the mean lengths in place of the longest.
    """
    work = sweep.estimate
    assert work is not None
    total, cached = 0.0, False
    for cell in left:
        config = configs[cell.variant]
        model, data, trainer = config.model.init_args, config.data.init_args, config.trainer
        weighting = (model.get("weighting") or {}).get("init_args") or {}
        estimator = (weighting.get("estimator") or {}).get("class_path", "").rpartition(".")[2] or None
        plan = _plan(work, data, trainer, weighting.get("every", 1))
        devices = trainer.devices if isinstance(trainer.devices, int) else max(1, sweep.devices)
        share, tokens = plan.global_batch_size // devices, work.prompt_tokens + 2 * work.response_tokens
        options = model.policy.init_args.as_dict() | {"model": work.model}
        if options["dtype"] == "auto":
            options["dtype"] = "bfloat16"
        strategy = {} if isinstance(trainer.strategy, str) else trainer.strategy.init_args.as_dict()
        zero = {"stage": strategy.get("stage", 0)}
        for key, name in (
            ("offload_optimizer", "offload_optimizer"),
            ("offload_param", "offload_parameters"),
        ):
            zero[key] = {"device": "cpu" if strategy.get(name) else "none"}
        flops, trained, needed = _policy(
            json.dumps(options),
            work.prompt_tokens,
            work.response_tokens,
            devices,
            json.dumps(zero),
            tuple(_ways(model, options, share, tokens)),
        )
        kept = zero["stage"] < 3 and affordable(share, trained, GPU_FREE * GIB - needed)
        update = update_flops(flops, plan, estimator, kept)
        if model.objective.class_path.endswith("DrDPO"):
            update += plan.global_batch_size * flops.forward  # the losses of its group
        once = run_flops(flops, plan, update, estimator is not None)
        # A second run with the cache of the first.
        further = run_flops(flops, plan, update, estimator is not None, fits=2) - once
        total += further if plan.cached and cached else once
        cached |= plan.cached
    return total


def _ways(model: Any, policy: Mapping[str, Any], share: int, tokens: int) -> list[tuple[int, bool]]:
    """Pairs of a micro-batch and whether to recompute, as a run tries them."""
    size, budget, asked = model.micro_batch_size, model.micro_batch_tokens, policy["gradient_checkpointing"]
    unknown = policy["attn_implementation"] == "eager"  # its memory is not estimated
    if size == "auto" and budget is None and not unknown:
        return ways_to_step(share, tokens, asked)
    pairs = share if budget is None else min(share, max(1, budget // tokens))
    if budget is None and size is not None:
        pairs = math.gcd(AUTO, share) if size == "auto" else size
    return [(pairs, False), (pairs, True)][unknown:] if asked == "auto" else [(pairs, asked)]


@lru_cache
def _policy(
    options: str, prompt: int, response: int, devices: int, zero: str, ways: tuple[tuple[int, bool], ...]
) -> tuple[PairFlops, int, float]:
    """Operations of a pair, trained parameters, and bytes of a step, by the first way that fits."""
    policy = PolicyModel(**json.loads(options))
    for pairs, recompute in ways:
        needed = step_bytes(policy, pairs, prompt, response, devices, json.loads(zero), recompute)
        if needed <= FREE * GPU_FREE * GIB:
            break
    lora = policy.lora["r"], policy.lora["target_modules"]
    model = build(model_config(policy.name), *lora, policy.dtype, policy.lora_compute_dtype)
    flops = pair_flops(
        model,
        prompt_tokens=prompt,
        response_tokens=response,
        shared=computes_prompt_once(policy),
        gradient_checkpointing=recompute,
    )
    return flops, sum(p.numel() for p in model.parameters() if p.requires_grad), needed


def _plan(work: Workload, data: Any, trainer: Any, every: int) -> Plan:
    pairs = work.pairs * max(1, trainer.max_epochs or 1)
    if trainer.max_steps > 0:
        pairs = min(pairs, trainer.max_steps * data.global_batch_size)
    updates = pairs // data.global_batch_size
    often = trainer.val_check_interval or 1.0
    epoch = work.pairs / data.global_batch_size
    validations = updates / (often if isinstance(often, int) else often * epoch)
    limit = trainer.limit_val_batches
    validated = min(work.validation_pairs, data.validation_sample or work.validation_pairs)
    if limit is not None:
        most = limit * (data.validation_batch_size if isinstance(limit, int) else validated)
        validated = min(validated, int(most))
    return Plan(
        data.global_batch_size,
        every,
        data.meta_batch_size,
        work.coverage,
        data.reference == "cached",
        pairs,
        validated,
        round(validations),
    )
