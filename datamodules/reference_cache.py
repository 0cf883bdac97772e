"""Log-probabilities and states of the reference, cached on disk whatever the label noise, method or order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from tqdm import tqdm

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing
from pacmr_lightning.policy import PolicyModel

from .token_columns import lengths_and_digest
from .tokenized_pairs import TokenizedPairs

_LAYOUT = 1
"""Part of the key; raise it when the stored form changes."""
PART = 1024
"""Pairs per file: what ranks share out, and at most what a killed run loses."""
BATCH_TOKENS = 16_384
"""Tokens of a forward pass, padding included."""
CPU_BATCH_TOKENS = 2048
"""The same on a CPU, where larger tensors are no faster and cost page faults."""


def cached_log_probs(
    policy: PolicyModel,
    pairs: TokenizedPairs,
    *,
    augmented: bool = False,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
    title: str = "Reference log-probabilities",
) -> np.ndarray:
    """Return (N, 2) reference log-probabilities in nats of chosen and rejected as found, cached on disk.

    NaN without the ``augmented`` prompt. The folder below ``HF_DATASETS_CACHE`` is named by a hash of tokens,
    weights and all options that change a value. Parts are renamed once complete, so concurrent runs do not
    disturb each other and a killed run continues. ``barrier`` waits for all ``world_size`` processes, which
    share the work.
    """
    return _cached(_log_probs, 2, policy, pairs, augmented, rank, world_size, barrier, title)


def cached_state_differences(policy: PolicyModel, pairs: TokenizedPairs) -> np.ndarray:
    """Return (N, 2H) ``reference_states``, chosen minus rejected as found, cached like log-probabilities."""
    width = 2 * policy.model.get_output_embeddings().weight.shape[1]
    return _cached(_state_differences, width, policy, pairs, False, 0, 1, lambda: None, "Reference's states")


def _log_probs(policy: PolicyModel, batch: PairBatch) -> torch.Tensor:
    found = policy.reference_log_probs(batch)
    return torch.stack([found.chosen, found.rejected], dim=1)


def _state_differences(policy: PolicyModel, batch: PairBatch) -> torch.Tensor:
    chosen, rejected = policy.reference_states(batch).unbind(1)
    return chosen - rejected


def _cached(
    ask: Callable[[PolicyModel, PairBatch], torch.Tensor],
    width: int,
    policy: PolicyModel,
    pairs: TokenizedPairs,
    augmented: bool,
    rank: int,
    world_size: int,
    barrier: Callable[[], None],
    title: str,
) -> np.ndarray:
    pairs.check_model(policy)
    asked = np.array(pairs.with_second_view if augmented else range(len(pairs)), dtype=np.int64)
    plain = TokenizedPairs(pairs.rows.select(asked, keep_in_memory=True), pairs.pad_id)

    def batch(places: np.ndarray) -> PairBatch:
        found = plain.batch(places.tolist(), augmented)
        return found if found.augmented is None else found.augmented

    columns = ("augmented_ids" if augmented else "prompt_ids", "chosen_ids", "rejected_ids")
    lengths, tokens = lengths_and_digest(plain.rows, *columns)
    # Longest first, so that a lack of memory shows at once.
    order = np.argsort(-lengths, kind="stable")
    key = {
        "layout": _LAYOUT,
        "reference": policy.reference_digest(),
        # Determined on the longest: with few response tokens, rounding would decide.
        "options": policy.log_prob_options(batch(order[:1])),
        "pairs": tokens,
    }
    if ask is not _log_probs:
        key["asked"] = ask.__name__
    text = json.dumps(key, sort_keys=True, indent=2)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "pacmr-reference" / name
    parts = [order[start : start + PART] for start in range(0, len(order), PART)]
    files = [folder / f"part-{number:05d}.npy" for number in range(len(parts))]
    most = CPU_BATCH_TOKENS if policy.device.type == "cpu" else BATCH_TOKENS
    barrier()  # before any rank writes, so that all find the same parts
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
                asked_now = batch(own[number] if number < len(own) else together[0][0])
                answers = ask(policy, move_data_to_device(asked_now, policy.device)).cpu().numpy()
                _check_finite(answers, asked_now.ids)
                if number < len(own):
                    values.append(answers)
                    progress.update(len(answers))
            if values:
                with replacing(folder / "key.json") as temporary:
                    temporary.write_text(text)
                with replacing(files[start + rank]) as temporary, open(temporary, "wb") as file:
                    np.save(file, np.concatenate(values))
    barrier()
    found = [_read(file, (len(part), width)) for file, part in zip(files, parts, strict=True)]
    result = np.full((len(pairs), width), np.nan, found[0].dtype if found else np.float32)
    if found:
        result[asked[order]] = np.concatenate(found)
    return result


def _batches(rows: np.ndarray, lengths: np.ndarray, most: int) -> list[np.ndarray]:
    """Split rows sorted by falling length into batches of at most ``most`` tokens."""
    batches, start = [], 0
    while start < len(rows):
        end = start + max(1, most // int(lengths[rows[start]]))
        batches.append(rows[start:end])
        start = end
    return batches


def _check_finite(values: np.ndarray, ids: list[str]) -> None:
    finite = np.isfinite(values).all(1)
    if not finite.all():
        raise UserError(
            f"What the reference says of the pair {ids[int(np.argmin(finite))]} is not a finite number; look "
            "at that pair, or load the model in float32."
        )


def _read(path: Path, shape: tuple[int, int]) -> np.ndarray:
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        values = None
    if values is None or values.shape != shape:
        raise UserError(
            f"{path}, a part of what the reference has said of the pairs, is missing or damaged; delete its "
            "folder to compute them again, or set data.reference to live."
        )
    return values
