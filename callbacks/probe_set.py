"""Weights of a fixed set of training pairs, asked of the current policy again and again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import cycle, islice

import pandas as pd
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from torch import Tensor

from pacmr_lightning.batch import UNKNOWN, PairBatch
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.rewards import Rewards

from .records import gathered

COLUMNS = ("u", "delta", "a", "b", "weight", "swapped_weight", "flipped")
"""Numbers of a probe pair."""
MICRO_BATCH = 32
"""Pairs in one forward pass where the module sets no ``micro_batch_size``."""


def probe_indices(ids: Sequence[str], count: int) -> list[int]:
    """Indices of the ``count`` of N ids with the smallest hashes, by hash; all of them if there are fewer.

    So which pairs are chosen depends neither on their order nor on anything but their ids.
    """

    def place(index: int) -> bytes:
        # Its own prefix: label noise and splits draw with hashes of ids too.
        return hashlib.blake2b(f"probe:{ids[index]}".encode(), digest_size=16).digest()

    return sorted(range(len(ids)), key=place)[:count]


@torch.no_grad()
def probe(trainer: Trainer, pl_module: PreferenceModule, indices: Sequence[int]) -> pd.DataFrame:
    """Asks the policy and the weighting about the training pairs at ``indices``, which the ranks share.

    All ranks take the same number of forward passes, as sharded models need: where the pairs cannot be shared
    evenly, some are asked twice and count once. The policy stays as it is, and so does the random state.

    Returns:
        The same on all ranks, one row a pair in the order of ``indices``: ``id``, ``category`` (None where
        the rows have none), ``u`` and ``delta`` in nats times beta, ``a`` and ``b`` (NaN where the weighting
        has none), ``weight`` (before any division by the mean), ``swapped_weight`` (the weight that VNet
        would give to the pair with its two responses exchanged; NaN without VNet, and where it looks at
        earlier visits, which were of this order), and ``flipped`` (pandas' ``boolean``, NA where unknown).
    """
    pairs, ranks = datamodule(trainer).train_pairs, trainer.world_size
    share = -(-len(indices) // ranks)
    mine = list(islice(cycle(indices), share * ranks))[trainer.global_rank :: ranks]
    device = trainer.strategy.root_device
    size = pl_module.micro_batch_size or MICRO_BATCH
    parts = []
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        # Hooks run outside the training step's autocast.
        trainer.precision_plugin.val_step_context(),
    ):
        for start in range(0, share, size):
            batch = move_data_to_device(pairs.batch(mine[start : start + size]), device)
            parts.append(_numbers(pl_module, batch))
    by_rank = gathered(torch.cat(parts), device)
    rows = torch.stack(by_rank, dim=1).flatten(0, 1)[: len(indices)]
    frame = pd.DataFrame(rows.numpy(), columns=list(COLUMNS))
    known = pairs.rows.select_columns(["id", "category"])[list(indices)]
    frame.insert(0, "id", known["id"])
    frame.insert(1, "category", pd.Series(known["category"], dtype=object))
    frame["flipped"] = (frame["flipped"] == 1).astype("boolean").mask(frame["flipped"] == UNKNOWN)
    return frame


def _numbers(pl_module: PreferenceModule, batch: PairBatch) -> Tensor:
    """(N, 7) float32 ``COLUMNS`` of N pairs."""
    reference = pl_module.policy.reference_log_probs(batch)
    batch = batch.with_reference(reference)
    weighting = pl_module.weighting
    log_probs = pl_module.policy.log_probs(batch, entropies=weighting.needs_entropies)
    rewards = Rewards.of(log_probs, batch, pl_module.objective.beta)
    weights = weighting.weights(rewards, batch)
    unknown = torch.full_like(rewards.u, torch.nan)
    swapped = unknown
    if pl_module.vnet is not None and not weighting.looks_back:
        swapped = weighting.weights(rewards.exchanged(), batch).g
    columns = (
        rewards.u,
        rewards.delta,
        unknown if weights.a is None else weights.a,
        unknown if weights.b is None else weights.b,
        weights.g,
        swapped,
        batch.flipped,
    )
    return torch.stack([column.float() for column in columns], dim=1)
