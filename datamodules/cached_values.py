"""On-disk cache of a model's values of pairs, independent of label noise, method and order."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from torch import Tensor
from tqdm import tqdm

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing, write_text
from pacmr_lightning.policy import PolicyModel

_LAYOUT = 3
"""Part of the key; raise it when the stored form changes."""
PART = 256
"""Pairs per file, the unit of work of a rank; a killed run loses at most one file."""
BATCH_TOKENS = 16_384
"""Tokens of a forward pass, padding included."""
CPU_BATCH_TOKENS = 2048
"""Tokens of a forward pass on a CPU, where larger tensors are no faster and cost page faults."""


@torch.no_grad()
def cached_values(
    ask: Callable[[PolicyModel, PairBatch], Tensor],
    policy: PolicyModel,
    collate: Callable[[list[int]], PairBatch],
    lengths: np.ndarray,
    tokens: str,
    *,
    title: str,
    of_adapter: bool = False,
    trainer: Trainer | None = None,
) -> np.ndarray:
    """Return (N, K) values of N > 0 pairs by ``ask``, which returns (n, K) for a batch of n.

    The folder below ``HF_DATASETS_CACHE`` is named by a hash of ``tokens`` (a hash of the pairs), weights and
    all options that change a value. Parts are renamed once complete, so concurrent runs do not disturb each
    other and a killed run continues.

    Args:
        ask: its name is part of the hash.
        policy: the model.
        collate: returns the pairs at some indices, on any device.
        lengths: (N,) tokens of each pair.
        tokens: hash of the pairs' tokens in their order.
        title: of the progress bar.
        of_adapter: whether values depend on the adapter, too, not on the reference alone.
        trainer: whose processes share the work; None for a single one.

    Raises:
        UserError: a value is not finite, or a file is damaged.
    """
    rank, world_size = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
    barrier = (lambda: None) if trainer is None else trainer.strategy.barrier
    whose = "by the reference; look at that pair, or load the model in float32"
    if of_adapter:
        whose = "so the policy has diverged; name an earlier checkpoint, or train with a lower learning rate"
    # Longest first, so that a lack of memory shows at once.
    order = np.argsort(-lengths, kind="stable")
    key = {
        "layout": _LAYOUT,
        "asked": ask.__name__,
        "reference": policy.reference_digest(),
        "adapter": [policy.lora, policy.adapter_digest()] if of_adapter else None,
        "options": policy.log_prob_options(),
        "pairs": tokens,
    }
    text = json.dumps(key, sort_keys=True, indent=2)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "pacmr-values" / name
    parts = [order[start : start + PART] for start in range(0, len(order), PART)]
    files = [folder / f"part-{number:05d}.npy" for number in range(len(parts))]
    most = CPU_BATCH_TOKENS if policy.device.type == "cpu" else BATCH_TOKENS
    if rank == 0 and not (folder / "key.json").exists():
        write_text(folder / "key.json", text)
    barrier()  # before any rank writes, so that all find the same parts
    if not (folder / "key.json").exists():
        raise UserError(
            f"{folder} was made by the first process, but another one does not see it; put HF_DATASETS_CACHE "
            "on storage that all machines share, or set data.reference to live."
        )
    missing = {i: _batches(part, lengths, most) for i, part in enumerate(parts) if not files[i].exists()}
    barrier()
    total = sum(len(parts[i]) for i in missing if i % world_size == rank)
    with tqdm(total=total, desc=title, unit=" pairs", disable=not missing or rank > 0) as progress:
        for start in range(0, len(parts), world_size):
            own = missing.get(start + rank, [])
            together = [missing[i] for i in range(start, start + world_size) if i in missing]
            # A sharded forward pass needs all ranks; those that are done repeat a batch.
            passes = max(map(len, together), default=0) if policy.is_sharded else len(own)
            values = []
            for number in range(passes):
                batch = collate((own[number] if number < len(own) else together[0][0]).tolist())
                answers = ask(policy, move_data_to_device(batch, policy.device)).cpu().numpy()
                if not (finite := np.isfinite(answers).all(1)).all():
                    odd = batch.ids[int(np.argmin(finite))]
                    raise UserError(f"A value of the pair {odd} is not finite, {whose}.")
                if number < len(own):
                    values.append(answers)
                    progress.update(len(answers))
            if values:
                with replacing(files[start + rank]) as temporary, open(temporary, "wb") as file:
                    np.save(file, np.concatenate(values))
    barrier()
    all_values = np.concatenate([_read(file, len(part)) for file, part in zip(files, parts, strict=True)])
    return all_values[np.argsort(order)]


def _batches(rows: np.ndarray, lengths: np.ndarray, most: int) -> list[np.ndarray]:
    """Split rows sorted by falling length into batches of at most ``most`` tokens."""
    batches, start = [], 0
    while start < len(rows):
        end = start + max(1, most // int(lengths[rows[start]]))
        batches.append(rows[start:end])
        start = end
    return batches


def _read(path: Path, count: int) -> np.ndarray:
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        values = None
    if values is None or values.ndim != 2 or len(values) != count:
        raise UserError(
            f"{path}, cached values of pairs, is missing or damaged; delete its folder to compute them "
            "again, or train with data.reference live."
        )
    return values
