"""Operations and GPU hours of a sweep's training, estimated as ``pacmr memory`` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..meta_gradient.step_pairs import affordable
from ..policy.attention import is_flash
from ..policy.token_layout import PROMPT_ONCE
from ..runs.memory_estimate import GIB, GPU_FREE, build, model_config
from ..runs.time_estimate import PairFlops, Plan, pair_flops, run_flops, update_flops
from .cells import Cell
from .spec import Sweep, Workload


def training_flops(sweep: Sweep, left: Sequence[Cell], configs: Mapping[str, Any]) -> float:
    """Return operations of the cells, all devices together, with one cache of the reference for all.

    ``configs`` are parsed configurations of ``pacmr fit`` by ``Cell.variant``. Preparations, responses and
    commands before a fit are left out. ``gradient_checkpointing: auto`` counts as recomputed, and single
    pairs' gradients as kept where a GPU of 80 GB has room for them beside the parameters.
    """
    work = sweep.estimate
    assert work is not None
    total, cached = 0.0, False
    for cell in left:
        config = configs[cell.variant]
        model, data, trainer = config.model.init_args, config.data.init_args, config.trainer
        lengths = (work.model, work.prompt_tokens, work.response_tokens)
        flops, trained, stays = _policy(*lengths, *_shape(model))
        weighting = (model.get("weighting") or {}).get("init_args") or {}
        estimator = (weighting.get("estimator") or {}).get("class_path", "").rpartition(".")[2] or None
        plan = _plan(work, data, trainer, weighting.get("every", 1))
        devices = trainer.devices if isinstance(trainer.devices, int) else max(1, sweep.devices)
        strategy = trainer.strategy if isinstance(trainer.strategy, str) else trainer.strategy.init_args
        kept = getattr(strategy, "stage", 0) < 3
        kept &= affordable(plan.global_batch_size // devices, trained, GPU_FREE * GIB - stays)
        update = update_flops(flops, plan, estimator, kept)
        if model.objective.class_path.endswith("DrDPO"):
            update += plan.global_batch_size * flops.forward  # the losses of its group
        once = run_flops(flops, plan, update, estimator is not None)
        # A second run with the cache of the first.
        further = run_flops(flops, plan, update, estimator is not None, fits=2) - once
        total += further if plan.cached and cached else once
        cached |= plan.cached
    return total


def _shape(model: Any) -> tuple[Any, ...]:
    policy = model.policy.init_args
    targets = policy.target_modules
    targets = targets if isinstance(targets, str) else tuple(targets)
    # With FlashAttention, auto is packed.
    once = policy.layout in PROMPT_ONCE and not is_flash(policy.attn_implementation)
    return policy.rank, targets, policy.dtype, once, policy.gradient_checkpointing is not False


@lru_cache
def _policy(
    model: str, prompt: int, response: int, rank: int, targets: Any, dtype: str, shared: bool, recompute: bool
) -> tuple[PairFlops, int, float]:
    """Operations of a pair, trained parameters, and bytes of all parameters."""
    kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    names = targets if isinstance(targets, str) else list(targets)
    policy = build(model_config(model), rank, names, kind)
    flops = pair_flops(
        policy,
        prompt_tokens=prompt,
        response_tokens=response,
        shared=shared,
        gradient_checkpointing=recompute,
    )
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    stays = float(sum(p.numel() * p.element_size() for p in policy.parameters()))
    return flops, trained, stays


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
