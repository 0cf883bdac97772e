"""Values of all training pairs under the trained policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..batch import UNKNOWN, LogProbs, PairBatch
from ..modules import PreferenceModule
from ..rewards import Rewards
from ..weighting import Weights
from .pair_log_probs import pair_log_probs, policy_and_reference, with_entropies

_PART = 1000


def last_pass(
    module: PreferenceModule,
    pairs: Any,
    answers: Path,
    *,
    indices: list[int] | None = None,
    micro_batch_size: int | None = None,
    name: str = "Last pass",
) -> pd.DataFrame:
    """Compute a module's values of N pairs with labels as trained; ``answers`` is a cache file.

    Returns N rows: ``id``, ``prompt`` (index among distinct prompts), ``category``, ``observed`` (the column
    of the response trained as chosen: "rejected" if the noise swapped it), ``weight``, ``u`` and ``delta``
    (nats), ``a`` and ``b`` (NaN if the weighting has none), ``loss`` (unweighted), ``pull`` (minus the
    derivative of the weighted loss by u), ``flipped`` (pandas' ``boolean``, NA if unknown).
    """
    indices = list(range(len(pairs))) if indices is None else indices
    found = pair_log_probs(
        module,
        pairs,
        indices,
        answers,
        name=name,
        ask=with_entropies if module.weighting.needs_entropies else policy_and_reference,
        micro_batch_size=micro_batch_size,
    ).squeeze(1)
    parts = []
    for start in range(0, len(indices), _PART):
        batch = pairs.batch(indices[start : start + _PART])
        policy, reference, *entropies = (
            LogProbs(*columns.unbind(1)) for columns in found[start : start + _PART].split(2, dim=1)
        )
        policy.entropies = entropies[0] if entropies else None
        batch = batch.with_reference(reference)
        parts.append(_columns(module, Rewards.of(policy, batch, module.objective.beta), batch))
    frame = pd.concat(parts, ignore_index=True)
    rows = pairs.rows.select_columns(["prompt", "category"]).select(indices)
    frame.insert(1, "prompt", pd.factorize(np.array(rows["prompt"][:], dtype=object))[0])
    frame.insert(2, "category", rows["category"][:])
    frame.insert(3, "observed", ["rejected" if pairs.swapped[i] else "chosen" for i in indices])
    return frame


def _pull(module: PreferenceModule, rewards: Rewards, weight: Tensor) -> Tensor:
    """(N,) minus the derivative of each weighted loss by u; of both orders for soft labels."""
    chosen = rewards.policy.chosen.detach().requires_grad_()
    free = replace(rewards, policy=replace(rewards.policy, chosen=chosen))
    with torch.enable_grad():
        losses = weight * module.objective(free)
        if module.weighting.soft_labels:
            losses = losses + (1 - weight) * module.objective(free.exchanged())
        (slope,) = torch.autograd.grad(losses.sum(), chosen)
    return -slope / rewards.beta


def _columns(module: PreferenceModule, rewards: Rewards, batch: PairBatch) -> pd.DataFrame:
    weights: Weights = module.weighting.weights(rewards, batch)
    with torch.no_grad():
        loss = module.objective(rewards)
    values = {"weight": weights.g, "u": rewards.u, "delta": rewards.delta, "a": weights.a, "b": weights.b}
    values |= {"loss": loss, "pull": _pull(module, rewards, weights.g)}
    nothing = torch.full_like(rewards.u, torch.nan)
    frame = pd.DataFrame(
        {name: (nothing if value is None else value).double().numpy() for name, value in values.items()}
    )
    frame.insert(0, "id", batch.ids)
    flipped = pd.Series(batch.flipped.numpy() == 1, dtype="boolean")
    frame["flipped"] = flipped.mask(batch.flipped.numpy() == UNKNOWN)
    return frame
