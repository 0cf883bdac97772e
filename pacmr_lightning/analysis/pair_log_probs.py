"""Log-probabilities of many pairs under policy and reference, cached on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from tqdm import tqdm

from ..batch import LogProbs, PairBatch
from ..errors import UserError
from ..evaluation.answer_store import AnswerStore, content_key
from ..modules import PreferenceModule
from ..policy import PolicyModel
from ..runs.finished_run import MOST_AT_ONCE

_SECONDS = 1.0
"""Seconds between two writes, which a kill can lose."""


def policy_and_reference(policy: PolicyModel, batch: PairBatch) -> Tensor:
    """(n, 4) the policy's log-probabilities of chosen and rejected, then the reference's."""
    return _sides(policy.log_probs(batch), policy.reference_log_probs(batch))


def with_entropies(policy: PolicyModel, batch: PairBatch) -> Tensor:
    """(n, 6) as ``policy_and_reference``, then the entropies of ``LogProbs``."""
    now = policy.log_probs(batch, entropies=True)
    assert now.entropies is not None
    return _sides(now, policy.reference_log_probs(batch), now.entropies)


def _sides(*found: LogProbs) -> Tensor:
    return torch.stack([side for one in found for side in (one.chosen, one.rejected)], dim=1)


@torch.no_grad()
def pair_log_probs(
    module: PreferenceModule,
    pairs: Any,
    indices: list[int],
    answers: Path,
    *,
    name: str,
    augmented: bool = False,
    micro_batch_size: int | None = None,
    ask: Callable[[PolicyModel, PairBatch], Tensor] = policy_and_reference,
) -> Tensor:
    """Compute (N, V, K) values of N pairs as labelled, by ``ask`` in batches of n: (n, K).

    V is 2 if ``augmented`` (also under augmented prompts), else 1. ``answers`` is a cache file, written once
    a second.
    """
    size = micro_batch_size or module.micro_batch_size or MOST_AT_ONCE
    Fabric(accelerator="auto", devices=1).to_device(module.policy)
    policy = module.policy.eval()
    device = policy.device
    columns = [f"{name}_ids" for name in ("prompt", "chosen", "rejected", "augmented")[: 3 + augmented]]
    rows = pairs.rows.select_columns(columns).select(indices)
    tokens = [[row[column] for column in columns] for row in rows]
    # Similar lengths save padding; the longest first shows a lack of memory at once.
    order = sorted(range(len(indices)), key=lambda i: -sum(map(len, tokens[i])))
    first = move_data_to_device(pairs.batch([indices[order[0]]]), device)
    judge = content_key(
        *(policy.reference_digest(), policy.log_prob_options(first), policy.lora, _digest(policy)),
        *([] if ask is policy_and_reference else [ask.__name__]),
    )
    keys = [
        content_key(judge, content_key(*own, bool(pairs.swapped[i])))
        for own, i in zip(tokens, indices, strict=True)
    ]
    with AnswerStore(answers) as store:
        answered = store.get(keys)
        order = [i for i in order if keys[i] not in answered]
        fresh: dict[str, list[list[float]]] = {}
        written = monotonic()
        with tqdm(total=len(keys), initial=len(keys) - len(order), desc=name, unit="pair") as bar:
            try:
                for start in range(0, len(order), size):
                    some = order[start : start + size]
                    batch = move_data_to_device(pairs.batch([indices[i] for i in some], augmented), device)
                    views = [batch, batch.augmented] if augmented else [batch]
                    values = torch.stack([ask(policy, view) for view in views], dim=1).tolist()
                    fresh |= {keys[i]: found for i, found in zip(some, values, strict=True)}
                    if monotonic() - written > _SECONDS:
                        store.put(fresh)
                        answered |= fresh
                        fresh, written = {}, monotonic()
                    bar.update(len(some))
            finally:
                store.put(fresh)
        answered |= fresh
    found = torch.tensor([answered[key] for key in keys])
    bad = ~torch.isfinite(found).flatten(1).all(1)
    if bad.any():
        raise UserError(
            f"A log-probability is not finite for {int(bad.sum())} of {len(found)} pairs, so the policy has "
            "diverged; name an earlier checkpoint, or train again with a lower learning rate."
        )
    return found


def _digest(policy: PolicyModel) -> str:
    digest = hashlib.sha256()
    for name, value in policy.adapter().items():
        digest.update(name.encode() + value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
