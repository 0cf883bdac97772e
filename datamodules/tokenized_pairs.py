"""Tokenized pairs under label noise, as batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from pacmr_lightning.batch import UNKNOWN, LogProbs, PairBatch
from pacmr_lightning.policy import PolicyModel

from .token_columns import check_readable, token_parts, tokens_digest

_TOKENS = ("prompt_ids", "augmented_ids", "chosen_ids", "rejected_ids")


class TokenizedPairs:
    """Tokenized pairs under label noise.

    ``swapped`` has N flags where the noise changes the label, None without noise. ``annotators`` has N names,
    None where unknown, and is None if all are.
    """

    def __init__(
        self,
        rows: Dataset,
        pad_id: int,
        swapped: Sequence[bool] | None = None,
        annotators: Sequence[str | None] | None = None,
    ):
        self.rows = rows
        self.pad_id = pad_id
        self.swapped = [False] * len(rows) if swapped is None else list(swapped)
        self.flipped = flip_flags(rows["flipped"][:], swapped)
        """N values: 1 wrong label, 0 right label, -1 unknown."""
        self.annotators = annotators
        self.reference: np.ndarray | None = None
        """(N, 2) cached reference log-probabilities of chosen and rejected as found."""
        self.augmented_reference: np.ndarray | None = None
        """(N, 2) the same under the augmented prompts; NaN for pairs without one."""

    def __len__(self) -> int:
        return len(self.rows)

    def check_model(self, policy: PolicyModel) -> None:
        """Raise a UserError if a model has too few positions or embeddings for the pairs."""

        def longer(prompt: Any, augmented: Any, chosen: Any, rejected: Any) -> np.ndarray:
            return np.maximum(prompt, augmented) + np.maximum(chosen, rejected)

        check_readable(policy.name, policy.model, self.rows, _TOKENS, longer, self.pad_id)

    def texts_digest(self) -> str:
        """Return a hash of the tokens of prompts and responses as found, in their order."""
        return tokens_digest(self.rows, "prompt_ids", "chosen_ids", "rejected_ids")

    def select(self, indices: Sequence[int]) -> TokenizedPairs:
        """Return some of the pairs, with their noise."""
        who = None if self.annotators is None else [self.annotators[i] for i in indices]
        chosen = TokenizedPairs(self.rows.select(indices, keep_in_memory=True), self.pad_id, annotators=who)
        chosen.swapped = [self.swapped[i] for i in indices]
        chosen.flipped = [self.flipped[i] for i in indices]
        return chosen

    def longest(self) -> tuple[int, int]:
        """Return the tokens of a prompt and a response of a longest pair, augmented prompts included."""
        total = response = 0
        for _, (prompt, augmented, chosen, rejected) in token_parts(self.rows, *_TOKENS):
            both = chosen + rejected
            response = max(response, int(both.max() + 1) // 2)
            total = max(total, int((np.maximum(prompt, augmented) + both).max()))
        return max(1, total - 2 * response), response

    @property
    def with_second_view(self) -> list[int]:
        """Indices of the pairs that have an augmented prompt."""
        return [i for i, view in enumerate(self.rows["second_view"][:]) if view]

    def batch(self, indices: Sequence[int], augmented: bool = False) -> PairBatch:
        """Return the pairs at ``indices`` under noise; ``augmented`` adds them under augmented prompts."""
        # One look-up for the whole batch: Arrow is slow row by row.
        columns = self.rows[list(indices)]
        swapped = [self.swapped[i] for i in indices]
        both = list(zip(swapped, columns["chosen_ids"], columns["rejected_ids"], strict=True))
        # eta refers to the order as found.
        eta = [
            1 - value if swap and value is not None else value
            for swap, value in zip(swapped, columns["eta"], strict=True)
        ]

        def collate(prompts: list[list[int]], reference: np.ndarray | None) -> PairBatch:
            batch = PairBatch.collate(
                columns["id"],
                prompts,
                [rejected if swap else chosen for swap, chosen, rejected in both],
                [chosen if swap else rejected for swap, chosen, rejected in both],
                flipped=[self.flipped[i] for i in indices],
                eta=eta,
                annotators=None if self.annotators is None else [self.annotators[i] for i in indices],
                pad_id=self.pad_id,
            )
            if reference is not None:
                values = torch.from_numpy(reference[list(indices)])
                flips = torch.tensor(swapped)[:, None]
                batch.reference = LogProbs(*torch.where(flips, values.flip(1), values).unbind(1))
            return batch

        batch = collate(columns["prompt_ids"], self.reference)
        if augmented:
            batch.augmented = collate(columns["augmented_ids"], self.augmented_reference)
        return batch


def flip_flags(given: Sequence[int], swapped: Sequence[bool] | None) -> list[int]:
    """Return N flip flags (-1 unknown) under noise; where ``given`` is -1, relative to the label as found."""
    if swapped is None:
        return list(given)
    return [
        known ^ int(swap) if known != UNKNOWN else int(swap)
        for known, swap in zip(given, swapped, strict=True)
    ]
