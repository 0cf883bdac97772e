"""What a policy believes of every training pair, in one last pass over all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ..batch import UNKNOWN, LogProbs
from ..modules import PreferenceModule
from ..rewards import Rewards
from ..weighting import Weights
from .pair_log_probs import pair_log_probs, policy_and_reference, with_entropies

_PART = 1000
"""Pairs that are read at a time."""


def last_pass(
    module: PreferenceModule,
    pairs: Any,
    answers: Path,
    *,
    indices: list[int] | None = None,
    micro_batch_size: int | None = None,
    name: str = "Last pass",
) -> pd.DataFrame:
    """What a module's policy, weighting and objective say of pairs, labels as trained.

    Args:
        module: on the CPU, or where its policy is to run.
        pairs: the datamodule's ``train_pairs``.
        answers: file where log-probabilities go while they are computed; what is in it is not computed again.
        indices: of N pairs among them; None for all.
        micro_batch_size: pairs in one forward pass; None is the module's, or 32 where that has none.
        name: of the progress bar.

    Returns:
        N rows: ``id``, ``prompt`` (its number among the distinct prompts), ``category``, ``observed`` (the
        column of the data whose response stood as the chosen one in training: "rejected" where the run's
        noise exchanged the two), ``weight``, ``u`` and ``delta`` (implicit reward difference and sum, in
        nats), ``a`` and ``b`` (NaN where the weighting has none), ``loss`` (unweighted), ``pull`` (by how
        much the weighted loss falls per nat of u), ``flipped`` (pandas' ``boolean``, NA where unknown).

    Raises:
        UserError: a log-probability is not finite.
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
    for place, name in ((1, "prompt"), (2, "category")):
        column = pairs.rows[name][:]
        frame.insert(place, name, [column[i] for i in indices])
    frame["prompt"] = pd.factorize(frame["prompt"])[0]
    frame.insert(3, "observed", ["rejected" if pairs.swapped[i] else "chosen" for i in indices])
    return frame


def _pull(module: PreferenceModule, rewards: Rewards, weight: Tensor) -> Tensor:
    """(N,) minus the derivative of each weighted loss by its pair's u; soft labels have both orders' loss."""
    chosen = rewards.policy.chosen.detach().requires_grad_()
    free = replace(rewards, policy=replace(rewards.policy, chosen=chosen))
    with torch.enable_grad():
        losses = weight * module.objective(free)
        if module.weighting.soft_labels:
            losses = losses + (1 - weight) * module.objective(free.exchanged())
        (slope,) = torch.autograd.grad(losses.sum(), chosen)
    return -slope / rewards.beta


def _columns(module: PreferenceModule, rewards: Rewards, batch: Any) -> pd.DataFrame:
    weights: Weights = module.weighting.weights(rewards, batch)
    with torch.no_grad():
        loss = module.objective(rewards)
    nothing = torch.full_like(rewards.u, torch.nan)
    values = {
        "weight": weights.g,
        "u": rewards.u,
        "delta": rewards.delta,
        "a": nothing if weights.a is None else weights.a,
        "b": nothing if weights.b is None else weights.b,
        "loss": loss,
        "pull": _pull(module, rewards, weights.g),
    }
    frame = pd.DataFrame({name: value.double().numpy() for name, value in values.items()})
    frame.insert(0, "id", batch.ids)
    flipped = batch.flipped.numpy()
    frame["flipped"] = pd.array(flipped == 1, dtype="boolean")
    frame.loc[flipped == UNKNOWN, "flipped"] = pd.NA
    return frame
