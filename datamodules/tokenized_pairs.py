"""Tokenized pairs under label noise, as batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from pacmr_lightning.batch import UNKNOWN, LogProbs, PairBatch
from pacmr_lightning.policy import PolicyModel

from .cached_values import cached_values
from .columns import VOTES
from .token_columns import check_readable, lengths_and_digest, row_lengths, token_parts, tokens_digest

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

    @property
    def p_right(self) -> list[float | None]:
        """N probabilities of the rows that the label as trained is right, None where missing."""
        return probabilities_as_trained(self.rows["p_right"][:], self.swapped)

    @property
    def votes(self) -> np.ndarray:
        """(N, 2) float64 numbers of votes for and against the label as trained; 1 and 0 without counts."""
        found = np.array([self.rows[name][:] for name in VOTES], dtype=float).T
        found[self.swapped] = found[self.swapped, ::-1]
        return np.where(np.isnan(found), (1, 0), found)

    @property
    def share_of_votes(self) -> list[float]:
        """N shares of the votes that are for the label as trained."""
        return list(self.votes[:, 0] / self.votes.sum(1))

    @property
    def ties(self) -> np.ndarray:
        """(N,) flags of labels with as many votes for them as against."""
        return self.votes[:, 0] == self.votes[:, 1]

    @property
    def own_columns(self) -> list[str]:
        """Names out of ``weight``, ``p_right`` and ``votes_for`` of which any row has a value."""
        names = ("weight", "p_right", "votes_for")
        return [name for name in names if any(value is not None for value in self.rows[name][:])]

    def texts_digest(self) -> str:
        """Return a hash of the tokens of prompts and responses as found, in their order."""
        return tokens_digest(self.rows, "prompt_ids", "chosen_ids", "rejected_ids")

    def select(self, indices: Sequence[int]) -> TokenizedPairs:
        """Return some of the pairs, with their noise."""
        who = None if self.annotators is None else [self.annotators[i] for i in indices]
        chosen = TokenizedPairs(self.rows.select(indices, keep_in_memory=True), self.pad_id, annotators=who)
        chosen.swapped = [self.swapped[i] for i in indices]
        chosen.flipped = [self.flipped[i] for i in indices]
        chosen.reference = None if self.reference is None else self.reference[list(indices)]
        return chosen

    def lengths(self, augmented: bool = False) -> np.ndarray:
        """Return (N,) tokens of each pair: its prompt, or ``augmented`` one if any, and both responses."""
        prompt = "augmented_ids" if augmented else "prompt_ids"
        return row_lengths(self.rows, prompt, "chosen_ids", "rejected_ids")

    def longest(self, count: int, augmented: bool = False) -> PairBatch:
        """Return the ``count`` longest pairs by falling length, or all; under ``augmented`` prompts."""
        places = self.with_augmented_prompt if augmented else range(len(self))
        lengths = self.lengths(augmented)
        batch = self.batch(sorted(places, key=lambda i: -lengths[i])[:count], augmented)
        return batch.augmented or batch

    def extremes(self) -> list[tuple[str, list[int], list[int], list[int]]]:
        """Return id, prompt, chosen and rejected of the longest row, longest sequence and shortest row.

        Each is there with its augmented prompt, too, if it has one.
        """
        parts = [np.stack(counts) for _, counts in token_parts(self.rows, *_TOKENS)]
        prompt, augmented, chosen, rejected = np.concatenate(parts, axis=1)
        longer, both = np.maximum(prompt, augmented), chosen + rejected
        sequence = longer + np.maximum(chosen, rejected)
        places = {int(i) for i in ((longer + both).argmax(), sequence.argmax(), (prompt + both).argmin())}
        columns = self.rows[sorted(places)]
        return [
            (columns["id"][i], prompt, columns["chosen_ids"][i], columns["rejected_ids"][i])
            for name in _TOKENS[:2]
            for i, prompt in enumerate(columns[name])
            if prompt
        ]

    @property
    def with_augmented_prompt(self) -> list[int]:
        """Indices of the pairs that have an augmented prompt."""
        return [i for i, view in enumerate(self.rows["has_augmented_prompt"][:]) if view]

    def batch(self, indices: Sequence[int], augmented: bool = False) -> PairBatch:
        """Return the pairs at ``indices`` under noise; ``augmented`` adds them under augmented prompts."""
        # One look-up for the whole batch: Arrow is slow row by row.
        columns = self.rows[list(indices)]
        swapped = [self.swapped[i] for i in indices]
        both = list(zip(swapped, columns["chosen_ids"], columns["rejected_ids"], strict=True))
        eta = probabilities_as_trained(columns["eta"], swapped)

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
                values = as_trained(torch.from_numpy(reference[list(indices)]), swapped)
                batch.reference = LogProbs(*values.unbind(1))
            return batch

        batch = collate(columns["prompt_ids"], self.reference)
        if augmented:
            batch.augmented = collate(columns["augmented_ids"], self.augmented_reference)
        return batch

    def values(
        self,
        ask: Callable[[PolicyModel, PairBatch], Tensor],
        policy: PolicyModel,
        title: str,
        *,
        augmented: bool = False,
        **options: Any,
    ) -> np.ndarray:
        """Return (N, K) ``cached_values`` of the pairs as found; NaN without the ``augmented`` prompt."""
        check_model(policy, self)
        asked = self.with_augmented_prompt if augmented else list(range(len(self)))
        plain = TokenizedPairs(self.rows.select(asked, keep_in_memory=True), self.pad_id)

        def collate(places: list[int]) -> PairBatch:
            batch = plain.batch(places, augmented)
            return batch if batch.augmented is None else batch.augmented

        if not asked:
            return np.full((len(self), 2), np.nan, np.float32)
        columns = ("augmented_ids" if augmented else "prompt_ids", "chosen_ids", "rejected_ids")
        pairs = lengths_and_digest(plain.rows, *columns)
        found = cached_values(ask, policy, collate, *pairs, title=title, **options)
        result = np.full((len(self), found.shape[1]), np.nan, found.dtype)
        result[asked] = found
        return result

    def values_as_trained(
        self, ask: Callable[[PolicyModel, PairBatch], Tensor], policy: PolicyModel, title: str
    ) -> Tensor:
        """Return (N, 2k) values of the policy, k of chosen and rejected in turn, labels as trained."""
        found = torch.from_numpy(self.values(ask, policy, title, of_adapter=True))
        sides = [as_trained(both, self.swapped) for both in found.split(2, dim=1)]
        return torch.cat(sides, dim=1)

    def reference_log_probs(
        self, policy: PolicyModel, title: str = "Reference log-probabilities", **options: Any
    ) -> np.ndarray:
        """Return (N, 2) reference log-probabilities in nats, chosen and rejected as found, by ``values``."""
        return self.values(_reference_log_probs, policy, title, **options)

    def state_differences(self, policy: PolicyModel) -> np.ndarray:
        """Return (N, H) ``reference_states``, chosen minus rejected as found, by ``values``."""
        return self.values(_mean_state_differences, policy, "Reference's states")


def check_model(policy: PolicyModel, *splits: TokenizedPairs) -> None:
    """Check a policy on the longest and shortest pairs of all splits; choose attention and layout by them.

    Raises:
        UserError: it has too few positions or embeddings for the pairs, or cannot compute them.
    """

    def longer(prompt: Any, augmented: Any, chosen: Any, rejected: Any) -> np.ndarray:
        return np.maximum(prompt, augmented) + np.maximum(chosen, rejected)

    for pairs in splits:
        check_readable(policy.name, policy.model, pairs.rows, _TOKENS, longer, pairs.pad_id)
    extremes = [row for pairs in splits for row in pairs.extremes()]
    batch = PairBatch.collate(*zip(*extremes, strict=True))
    policy.check(move_data_to_device(batch, policy.device))


def _reference_log_probs(policy: PolicyModel, batch: PairBatch) -> Tensor:
    found = policy.reference_log_probs(batch)
    return torch.stack([found.chosen, found.rejected], dim=1)


def _mean_state_differences(policy: PolicyModel, batch: PairBatch) -> Tensor:
    chosen, rejected = policy.reference_states(batch).unbind(1)
    return chosen - rejected


def as_trained(values: Tensor, swapped: Sequence[bool]) -> Tensor:
    """Return (n, 2) values of chosen and rejected, exchanged where ``swapped``."""
    return torch.where(torch.tensor(swapped)[:, None], values.flip(1), values)


def probabilities_as_trained(found: Sequence[float | None], swapped: Sequence[bool]) -> list[float | None]:
    """Return probabilities of labels as found, of the opposite event where ``swapped``."""
    return [1 - p if swap and p is not None else p for p, swap in zip(found, swapped, strict=True)]


def flip_flags(given: Sequence[int], swapped: Sequence[bool] | None) -> list[int]:
    """Return N flip flags (-1 unknown) under noise; where ``given`` is -1, relative to the label as found."""
    if swapped is None:
        return list(given)
    return [
        known ^ int(swap) if known != UNKNOWN else int(swap)
        for known, swap in zip(given, swapped, strict=True)
    ]
