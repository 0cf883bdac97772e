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


class Pairs:
    """Tokenized pairs under label noise.

    Args:
        rows: N rows, as ``tokenize_pairs`` makes them.
        pad_id: token id that fills rows up.
        swapped: N flags, true where the noise changed the label: the two responses change places. None: no
            noise was injected.
        annotators: N names of those who gave the labels, None where unknown; None where all are.
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
        """N flags: the noise changed the label."""
        self.flipped = flip_flags(rows["flipped"][:], swapped)
        """N values: 1 the label is wrong, 0 it is not, -1 unknown."""
        self.annotators = annotators
        self.reference: np.ndarray | None = None
        """(N, 2) the reference's log-probabilities of chosen and rejected as found, where they are cached."""
        self.augmented_reference: np.ndarray | None = None
        """(N, 2) the same under the reworded prompts; NaN for pairs without a second view."""

    def __len__(self) -> int:
        return len(self.rows)

    def check_model(self, policy: PolicyModel) -> None:
        """Check that a model can read the pairs, their reworded prompts included.

        Raises:
            UserError: it has too few positions, or too few embeddings for the tokenizer.
        """

        def longer(prompt: Any, augmented: Any, chosen: Any, rejected: Any) -> np.ndarray:
            return np.maximum(prompt, augmented) + np.maximum(chosen, rejected)

        check_readable(policy.name, policy.model, self.rows, _TOKENS, longer, self.pad_id)

    def texts_digest(self) -> str:
        """Return a hash of the tokens of prompts and responses as found, in their order."""
        return tokens_digest(self.rows, "prompt_ids", "chosen_ids", "rejected_ids")

    def select(self, indices: Sequence[int]) -> Pairs:
        """Some of the pairs, with their noise."""
        who = None if self.annotators is None else [self.annotators[i] for i in indices]
        chosen = Pairs(self.rows.select(indices, keep_in_memory=True), self.pad_id, annotators=who)
        chosen.swapped = [self.swapped[i] for i in indices]
        chosen.flipped = [self.flipped[i] for i in indices]
        return chosen

    def longest(self) -> tuple[int, int]:
        """Tokens of a prompt and of a response of a pair as long as any, also under augmented prompts."""
        total = response = 0
        for _, (prompt, augmented, chosen, rejected) in token_parts(self.rows, *_TOKENS):
            both = chosen + rejected
            response = max(response, int(both.max() + 1) // 2)
            total = max(total, int((np.maximum(prompt, augmented) + both).max()))
        return max(1, total - 2 * response), response

    @property
    def with_second_view(self) -> list[int]:
        """Indices of the pairs that have a reworded prompt."""
        return [i for i, view in enumerate(self.rows["second_view"][:]) if view]

    def batch(self, indices: Sequence[int], augmented: bool = False) -> PairBatch:
        """The pairs at ``indices`` under noise, with their ``augmented`` views where asked for."""
        # One look-up for the whole batch: Arrow is slow row by row.
        columns = self.rows[list(indices)]
        swapped = [self.swapped[i] for i in indices]
        both = list(zip(swapped, columns["chosen_ids"], columns["rejected_ids"], strict=True))
        # eta speaks of the order that was found.
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
    """What is known of N labels once the noise is applied: 1 flipped, 0 not, -1 unknown.

    Args:
        given: N values of the data's own ``flipped`` column, -1 where it says nothing.
        swapped: N flags, true where the noise swaps the two responses; the flags of rows that say nothing of
            themselves are then relative to the label that was found. None: there is no noise, and nothing is
            claimed of them.
    """
    if swapped is None:
        return list(given)
    return [
        known ^ int(swap) if known != UNKNOWN else int(swap)
        for known, swap in zip(given, swapped, strict=True)
    ]
