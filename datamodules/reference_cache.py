"""Log-probabilities and states of the reference, computed once for all pairs and kept on disk for all runs.

They depend on the reference and on the tokens, not on label noise, method or order, so a sweep pays once.
"""

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

from .pairs import Pairs
from .token_columns import lengths_and_digest

_LAYOUT = 1
"""Part of the key; raised whenever the same model and tokens are written in another form."""
PART = 1024
"""Pairs in a file: what a killed run loses at most, and what ranks share out."""
BATCH_TOKENS = 16_384
"""Tokens of a forward pass, padding included; without gradient it takes little memory."""
CPU_BATCH_TOKENS = 2048
"""The same on a CPU, where larger tensors are no faster and cost page faults."""


def cached_log_probs(
    policy: PolicyModel,
    pairs: Pairs,
    *,
    augmented: bool = False,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
    title: str = "Reference log-probabilities",
) -> np.ndarray:
    """Log-probabilities of N pairs under the reference, from disk where they have been computed before.

    They are kept below datasets' cache folder (``HF_DATASETS_CACHE``), in a folder whose name is a hash of
    all that changes a value: the reference's weights and configuration, its precision, attention
    implementation and layout of tokens, and the tokens of all pairs. Parts are written under a temporary name
    and renamed, so runs that build the same cache at once do not disturb each other, and a killed run goes
    on.

    Args:
        policy: its reference is asked.
        pairs: N pairs.
        augmented: under their reworded prompts, those pairs that have one.
        rank: this process.
        world_size: number of processes, which share the work.
        barrier: waits for all processes.
        title: of the progress bar.

    Returns:
        (N, 2) log-probabilities in nats of chosen and rejected as found, before any noise; NaN where a pair
        has no reworded prompt.

    Raises:
        UserError: a value is not finite, or a part is missing or damaged.
    """
    return _cached(_log_probs, 2, policy, pairs, augmented, rank, world_size, barrier, title)


def cached_state_differences(policy: PolicyModel, pairs: Pairs) -> np.ndarray:
    """What the reference's layers hold of chosen minus rejected, kept on disk like log-probabilities.

    Args:
        policy: its reference is asked.
        pairs: N pairs.

    Returns:
        (N, 2H) differences of ``PolicyModel.reference_states``, chosen minus rejected as found, before any
        noise.

    Raises:
        UserError: as ``cached_log_probs``.
    """
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
    pairs: Pairs,
    augmented: bool,
    rank: int,
    world_size: int,
    barrier: Callable[[], None],
    title: str,
) -> np.ndarray:
    """(N, width) values that ``ask`` gives of pairs as found; see ``cached_log_probs``."""
    pairs.check_model(policy)
    asked = np.array(pairs.with_second_view if augmented else range(len(pairs)), dtype=np.int64)
    plain = Pairs(pairs.rows.select(asked, keep_in_memory=True), pairs.pad_id)

    def batch(places: np.ndarray) -> PairBatch:
        found = plain.batch(places.tolist(), augmented)
        return found if found.augmented is None else found.augmented

    columns = ("augmented_ids" if augmented else "prompt_ids", "chosen_ids", "rejected_ids")
    lengths, tokens = lengths_and_digest(plain.rows, *columns)
    # The longest first, so that a batch that does not fit into memory shows at once.
    order = np.argsort(-lengths, kind="stable")
    key = {
        "layout": _LAYOUT,
        "reference": policy.reference_digest(),
        # Tried on the longest: with few response tokens, rounding would decide which way is right.
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
    barrier()  # before any rank writes, so that all of them find the same parts
    missing = {i: _batches(part, lengths, most) for i, part in enumerate(parts) if not files[i].exists()}
    barrier()
    total = sum(len(parts[i]) for i in missing if i % world_size == rank)
    with tqdm(total=total, desc=title, unit=" pairs", disable=not missing or rank > 0) as progress:
        for start in range(0, len(parts), world_size):
            own = missing.get(start + rank, [])
            together = [missing[i] for i in range(start, start + world_size) if i in missing]
            # Where a forward pass needs all ranks, those that have nothing more to ask repeat a batch.
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
    """Rows that are sorted by length, cut where a forward pass has ``most`` tokens."""
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
