"""Operations of a sweep's training: 2 per parameter and token of a forward pass.

A backward pass through a frozen base takes as many again, since it has gradients of activations only; so does
recomputation. Attention's products of tokens, padding and the adapter's own are left out.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from ..policy.base_model import parameter_count
from .cells import Cell
from .spec import LLAMA, Sweep, Workload

LLAMA_PARAMETERS = 6_738_415_616
"""Parameters of Llama-2-7B, for which no files are needed."""
parameters_of = cache(parameter_count)


def training_flops(sweep: Sweep, left: Sequence[Cell], configs: Mapping[str, Any]) -> float:
    """Return operations of the cells, all devices together, with one cache of the reference for all.

    ``configs`` are parsed configurations of ``pacmr fit`` by ``Cell.variant``. Preparations, responses and
    commands before a fit are left out. Activations count as kept where ``gradient_checkpointing`` is "auto",
    as do single pairs' gradients.
    """
    work = sweep.estimate
    assert work is not None
    size = LLAMA_PARAMETERS if work.model == LLAMA else parameters_of(work.model)
    total, cached = 0.0, 0.0
    for cell in left:
        passes, once = forward_passes(work, configs[cell.variant])
        policy = configs[cell.variant].model.init_args.policy.init_args
        tokens = work.prompt_tokens + 2 * work.response_tokens
        if policy.layout == "separate":
            tokens += work.prompt_tokens
        total += 2 * size * tokens * (passes + max(0, once - cached))
        cached = max(cached, once)
    return total


def forward_passes(work: Workload, config: Any) -> tuple[float, float]:
    """Return a run's passes over a pair, in forward ones, and those that fill the reference's cache."""
    model, data, trainer = config.model.init_args, config.data.init_args, config.trainer
    weighting = (model.get("weighting") or {}).get("init_args") or {}
    estimator = (weighting.get("estimator") or {}).get("class_path")
    pairs, batch = work.pairs * max(1, trainer.max_epochs or 1), data.global_batch_size
    if trainer.max_steps > 0:
        pairs = min(pairs, trainer.max_steps * batch)
    updates = pairs // batch
    gradient = 3 if model.policy.init_args.gradient_checkpointing is True else 2
    live = int(data.reference != "cached")
    update = batch * (gradient + live)
    if model.objective.class_path.endswith("DrDPO"):
        update += batch  # the losses of its group
    once = 0 if live else pairs
    if estimator:
        meta = data.meta_batch_size
        learning = meta * (1 + live + work.coverage * (gradient + live))  # both views
        if estimator.endswith("CentralDifference"):
            learning += 2 * batch
        update += learning / weighting["every"]
        if not live:
            once += min(meta * -(-updates // weighting["every"]), pairs)  # augmented prompts
    return updates * update + 2 * _validated(work, data, trainer, updates), once


def _validated(work: Workload, data: Any, trainer: Any, updates: int) -> float:
    """Pairs of all validations, which run policy and reference."""
    often, limit = trainer.val_check_interval or 1.0, trainer.limit_val_batches
    validations = updates / (often if isinstance(often, int) else often * work.pairs / data.global_batch_size)
    pairs = min(work.validation_pairs, data.validation_sample or work.validation_pairs)
    if limit is not None:
        pairs = min(pairs, int(limit * (data.validation_batch_size if isinstance(limit, int) else pairs)))
    return round(validations) * pairs
