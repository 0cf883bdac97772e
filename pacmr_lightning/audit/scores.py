"""What a policy believes of every training pair, in one last pass over all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device
from tqdm import tqdm

from ..batch import UNKNOWN, LogProbs
from ..errors import UserError
from ..evaluation.store import AnswerStore, content_key
from ..modules import PreferenceModule
from ..policy import PolicyModel
from ..rewards import Rewards
from ..weighting import Weights

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
        answers: file where log-probabilities go as soon as they are there; what is in it is not computed
            again.
        indices: of N pairs among them; None for all.
        micro_batch_size: pairs in one forward pass; None is that of training, or 32 where that has none.
        name: of the progress bar.

    Returns:
        N rows: ``id``, ``prompt`` (its number among the distinct prompts), ``category``, ``observed`` (the
        column of the data whose response stood as the chosen one in training: "rejected" where the run's
        noise exchanged the two), ``weight``, ``u`` and ``delta`` (implicit reward difference and sum, in
        nats), ``a`` and ``b`` (NaN where the weighting has none), ``loss`` (unweighted), ``flipped`` (pandas'
        ``boolean``, NA where unknown).

    Raises:
        UserError: a log-probability is not finite.
    """
    indices = list(range(len(pairs))) if indices is None else indices
    size = micro_batch_size or module.micro_batch_size or 32
    with AnswerStore(answers) as store:
        found = torch.tensor(_log_probs(module.policy, pairs, indices, store, size, name))
    if not torch.isfinite(found).all():
        raise UserError(
            f"A log-probability is not finite for {int((~torch.isfinite(found)).any(1).sum())} of "
            f"{len(found)} pairs, so the policy has diverged; name an earlier checkpoint, or train again "
            "with a lower learning rate."
        )
    parts = []
    for start in range(0, len(indices), _PART):
        batch = pairs.batch(indices[start : start + _PART])
        policy, *reference = found[start : start + _PART].split([2, 1, 1], dim=1)
        batch = batch.with_reference(LogProbs(*(column.squeeze(1) for column in reference)))
        parts.append(
            _columns(module, Rewards.of(LogProbs(*policy.unbind(1)), batch, module.objective.beta), batch)
        )
    frame = pd.concat(parts, ignore_index=True)
    for place, name in ((1, "prompt"), (2, "category")):
        column = pairs.rows[name][:]
        frame.insert(place, name, [column[i] for i in indices])
    frame["prompt"] = pd.factorize(frame["prompt"])[0]
    frame.insert(3, "observed", ["rejected" if pairs.swapped[i] else "chosen" for i in indices])
    return frame


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
    }
    frame = pd.DataFrame({name: value.double().numpy() for name, value in values.items()})
    frame.insert(0, "id", batch.ids)
    flipped = batch.flipped.numpy()
    frame["flipped"] = pd.array(flipped == 1, dtype="boolean")
    frame.loc[flipped == UNKNOWN, "flipped"] = pd.NA
    return frame


@torch.no_grad()
def _log_probs(
    policy: PolicyModel, pairs: Any, indices: list[int], store: AnswerStore, size: int, name: str
) -> list[list[float]]:
    """Of each pair the policy's log-probabilities of chosen and rejected, then the reference's."""
    policy = Fabric(accelerator="auto", devices=1).to_device(policy).eval()
    device = next(iter(policy.adapter().values())).device
    tokens, lengths = _tokens(pairs, indices)
    # Equal lengths together save padding; the longest first, so that too little memory shows at once.
    order = sorted(range(len(indices)), key=lambda i: -lengths[i])
    first = move_data_to_device(pairs.batch([indices[order[0]]]), device)
    adapter = hashlib.sha256()
    for key, value in policy.adapter().items():
        adapter.update(key.encode() + value.detach().cpu().numpy().tobytes())
    judge = [policy.reference_digest(), policy.log_prob_options(first), policy.lora, adapter.hexdigest()]
    judge = content_key(*judge)
    keys = [content_key(judge, pair) for pair in tokens]
    answered = store.get(keys)
    order = [i for i in order if keys[i] not in answered]
    with tqdm(total=len(keys), initial=len(keys) - len(order), desc=name, unit="pair") as bar:
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            batch = move_data_to_device(pairs.batch([indices[i] for i in rows]), device)
            now, reference = policy.log_probs(batch), policy.reference_log_probs(batch)
            values = torch.stack([now.chosen, now.rejected, reference.chosen, reference.rejected], dim=1)
            part = {keys[i]: four for i, four in zip(rows, values.tolist(), strict=True)}
            store.put(part)
            answered |= part
            bar.update(len(rows))
    return [answered[key] for key in keys]


def _tokens(pairs: Any, indices: list[int]) -> tuple[list[str], list[int]]:
    """For each pair, in the order of its label, a hash of its tokens and their number."""
    hashes, lengths = [], []
    for start in range(0, len(indices), _PART):
        some = indices[start : start + _PART]
        part = pairs.rows[some]
        columns = (part[f"{name}_ids"] for name in ("prompt", "chosen", "rejected"))
        for i, prompt, chosen, rejected in zip(some, *columns, strict=True):
            hashes.append(content_key(prompt, chosen, rejected, pairs.swapped[i]))
            lengths.append(len(prompt) + len(chosen) + len(rejected))
    return hashes, lengths
