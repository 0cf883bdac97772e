"""A policy as a fixed judge of pairs: u under both wordings of their prompts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from torch import Tensor
from tqdm import tqdm

from ..batch import PairBatch
from ..errors import UserError
from ..evaluation.store import AnswerStore, content_key
from ..modules import PreferenceModule
from ..policy import PolicyModel
from ..rewards import Rewards

Split = Literal["train", "validation"]

_PART = 1000
"""Rows that are read at a time."""


def judged_pairs(
    module: PreferenceModule,
    data: LightningDataModule,
    split: Split,
    answers: Path,
    *,
    pairs: int | None,
    seed: int,
    micro_batch_size: int | None,
) -> pd.DataFrame:
    """u of the pairs that have a second view, under both; what is on disk is not computed again.

    Args:
        module: with the policy.
        data: the pairs, with labels as found.
        split: which of them.
        answers: file where values go as soon as they are there.
        pairs: how many, at random; None for all.
        seed: which, where ``pairs`` is given.
        micro_batch_size: pairs in one forward pass; None is that of training, or 32 where that has none.

    Returns:
        One row a pair: ``id``, ``prompt`` (its number among the distinct prompts), ``u`` and ``augmented_u``
        (in nats), ``clean`` (1: the response found as chosen is better; 0: the row's ``flipped`` says that
        the other one is), ``category``, and ``given_view`` (the row brings its second wording; otherwise it
        is the rule-based one). The frame's ``attrs`` say how many pairs had ``no_second_view``.

    Raises:
        UserError: no pair has a second view, ``pairs`` is out of range, or u is not finite.
    """
    data.setup("fit" if split == "train" else "validate")
    known = data.train_pairs if split == "train" else data.validation_pairs
    eligible = known.with_second_view
    if not eligible:
        raise UserError(
            f"None of the {len(known)} {split} pairs has a second view of its prompt; give the rows an "
            "augmented_prompt (no rule for rewording applied)."
        )
    indices = eligible
    if pairs is not None:
        if not 1 <= pairs <= len(eligible):
            raise UserError(
                f"pairs is {pairs}, but a sample of the {len(eligible)} {split} pairs with a second view "
                f"must have 1 to {len(eligible)}."
            )
        indices = sorted(np.random.default_rng(seed).choice(eligible, pairs, replace=False).tolist())
    size = micro_batch_size or module.micro_batch_size or 32
    with AnswerStore(answers) as store:
        u = np.array(_ask(module, known, indices, store, size, f"{data.task}, {split}"))
    if not np.isfinite(u).all():
        raise UserError(
            f"u is not finite for {(~np.isfinite(u)).any(1).sum()} of {len(u)} pairs, so the policy has "
            "diverged; name an earlier checkpoint, or train again with a lower learning rate."
        )
    frame = _frame(known, indices, u)
    if split == "train" and data.augmentations:
        frame["given_view"] = True
    else:
        rows = data.source.load(split)
        given = {name for name, view in zip(rows["id"], rows["augmented_prompt"], strict=True) if view}
        frame["given_view"] = [name in given for name in frame["id"]]
    frame.attrs["no_second_view"] = len(known) - len(eligible)
    return frame


def _ask(
    module: PreferenceModule, known: Any, indices: list[int], store: AnswerStore, size: int, name: str
) -> list[list[float]]:
    """u of both views of each of the pairs at ``indices``, from the store or computed now."""
    beta = module.objective.beta
    policy = Fabric(accelerator="auto", devices=1).to_device(module.policy).eval()
    device = next(iter(policy.adapter().values())).device
    tokens, lengths = _tokens(known.rows, indices)
    # Equal lengths together save padding; the longest first, so that too little memory shows at once.
    order = sorted(range(len(indices)), key=lambda i: -lengths[i])
    first = move_data_to_device(known.batch([indices[order[0]]]), device)
    adapter = [policy.lora, _digest(policy.adapter())]
    judge = content_key(policy.reference_digest(), policy.log_prob_options(first), adapter, beta)
    keys = [content_key(judge, pair) for pair in tokens]
    answered = store.get(keys)
    order = [i for i in order if keys[i] not in answered]
    with tqdm(total=len(keys), initial=len(keys) - len(order), desc=name, unit="pair") as bar:
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            batch = move_data_to_device(known.batch([indices[i] for i in rows], augmented=True), device)
            values = [_u(policy, beta, view).tolist() for view in (batch, batch.augmented)]
            part = {keys[i]: both for i, both in zip(rows, zip(*values, strict=True), strict=True)}
            store.put(part)
            answered |= part
            bar.update(len(rows))
    return [answered[key] for key in keys]


@torch.no_grad()
def _u(policy: PolicyModel, beta: float, batch: PairBatch) -> Tensor:
    """(N,) implicit reward differences."""
    return Rewards(policy.log_probs(batch), policy.reference_log_probs(batch), beta).u


def _digest(adapter: dict[str, torch.nn.Parameter]) -> str:
    digest = hashlib.sha256()
    for name, value in adapter.items():
        digest.update(name.encode() + value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _tokens(rows: Any, indices: list[int]) -> tuple[list[str], list[int]]:
    """For each pair a hash of its tokens, of both prompts and both responses, and their number."""
    hashes, lengths = [], []
    for start in range(0, len(indices), _PART):
        part = rows[indices[start : start + _PART]]
        columns = (part[f"{name}_ids"] for name in ("prompt", "augmented", "chosen", "rejected"))
        for tokens in zip(*columns, strict=True):
            hashes.append(content_key(*tokens))
            lengths.append(sum(map(len, tokens)))
    return hashes, lengths


def _frame(known: Any, indices: list[int], u: np.ndarray) -> pd.DataFrame:
    columns = {name: list(known.rows[name]) for name in ("id", "prompt", "category")}
    frame = pd.DataFrame({name: [column[i] for i in indices] for name, column in columns.items()})
    frame["prompt"] = pd.factorize(frame["prompt"])[0]
    frame.insert(2, "u", u[:, 0])
    frame.insert(3, "augmented_u", u[:, 1])
    frame.insert(4, "clean", [int(known.flipped[i] != 1) for i in indices])
    return frame
