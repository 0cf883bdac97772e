"""Tokenized pairs under label noise, as batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from lightning.fabric.utilities import move_data_to_device
from pyarrow import compute
from torch import Tensor

from pacmr_lightning.batch import UNKNOWN, LogProbs, PairBatch
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.positions import check_tokens

from .cached_values import cached_values
from .columns import VOTES

_TOKENS = ("prompt_ids", "augmented_ids", "chosen_ids", "rejected_ids")
_SIDES = (("chosen", "rejected"), ("chosen_ids", "rejected_ids"), VOTES)


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
        self._noisy = swapped is not None
        self.annotators = annotators
        self.reference: np.ndarray | None = None
        """(N, 2) cached reference log-probabilities of chosen and rejected as trained."""
        self.augmented_reference: np.ndarray | None = None
        """(N, 2) the same under the augmented prompts; NaN for pairs without one."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def flipped(self) -> list[int]:
        """N values: 1 wrong label, 0 right, -1 unknown or tie; under noise unknown: whether it swapped."""
        labels = zip(self.rows["flipped"][:], self.swapped, strict=True)
        unknown = 0 if self._noisy else UNKNOWN
        flips = [int(swap) or unknown if known == UNKNOWN else known ^ int(swap) for known, swap in labels]
        return np.where(self.ties, UNKNOWN, flips).tolist()

    @property
    def p_right(self) -> list[float | None]:
        """N probabilities that the label as trained is right; at ties 0.5 where missing, else None."""
        given = as_trained({"p_right": self.rows["p_right"][:]}, self.swapped)["p_right"]
        return [0.5 if p is None and tie else p for p, tie in zip(given, self.ties, strict=True)]

    @property
    def votes(self) -> np.ndarray:
        """(N, 2) float64 numbers of votes for and against the label as trained; 1 and 0 without counts."""
        columns = as_trained({name: self.rows[name][:] for name in VOTES}, self.swapped)
        votes = np.array([columns[name] for name in VOTES], dtype=float).T
        return np.where(np.isnan(votes), (1, 0), votes)

    @property
    def vote_shares(self) -> np.ndarray:
        """(N,) shares of the votes that are for the label as trained."""
        votes = self.votes
        return votes[:, 0] / votes.sum(1)

    @property
    def ties(self) -> np.ndarray:
        """(N,) whether as many votes are for either response."""
        return self.vote_shares == 0.5

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
        swapped = [self.swapped[i] for i in indices] if self._noisy else None
        who = None if self.annotators is None else [self.annotators[i] for i in indices]
        rows = self.rows.select(indices, keep_in_memory=True)
        chosen = TokenizedPairs(rows, self.pad_id, swapped, who)
        chosen.reference = None if self.reference is None else self.reference[list(indices)]
        return chosen

    def lengths(self, augmented: bool = False) -> np.ndarray:
        """Return (N,) tokens of each pair: its prompt, or ``augmented`` one if any, and both responses."""
        prompt = "augmented_ids" if augmented else "prompt_ids"
        return part_lengths(self.rows, prompt, "chosen_ids", "rejected_ids").sum(0)

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """(N,) ``lengths`` of the rows, by which batches are sorted."""
        return self.lengths()

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
        prompt, augmented, chosen, rejected = part_lengths(self.rows, *_TOKENS)
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
        columns = as_trained(self.rows[list(indices)], [self.swapped[i] for i in indices])

        def collate(prompts: list[list[int]], reference: np.ndarray | None) -> PairBatch:
            batch = PairBatch.collate(
                columns["id"],
                prompts,
                columns["chosen_ids"],
                columns["rejected_ids"],
                flipped=[self.flipped[i] for i in indices],
                eta=columns["eta"],
                annotators=None if self.annotators is None else [self.annotators[i] for i in indices],
                pad_id=self.pad_id,
            )
            if reference is not None:
                batch.reference = LogProbs(*torch.from_numpy(reference[list(indices)]).unbind(1))
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
        differences: bool = False,
        **options: Any,
    ) -> np.ndarray:
        """Return (N, K) values of labels as trained; NaN without the ``augmented`` prompt.

        ``ask`` returns values of chosen and rejected in turn, or ``differences`` of the two.
        ``cached_values`` are of labels as found, so that runs with other label noise share them.
        """
        check_model(policy, self)
        asked = self.with_augmented_prompt if augmented else list(range(len(self)))
        plain = TokenizedPairs(self.rows.select(asked, keep_in_memory=True), self.pad_id)

        def collate(places: list[int]) -> PairBatch:
            batch = plain.batch(places, augmented)
            return batch.augmented or batch

        if not asked:
            return np.full((len(self), 2), np.nan, np.float32)
        columns = ("augmented_ids" if augmented else "prompt_ids", "chosen_ids", "rejected_ids")
        pairs = lengths_and_digest(plain.rows, *columns)
        values = cached_values(ask, policy, collate, *pairs, title=title, **options)
        result = np.full((len(self), values.shape[1]), np.nan, values.dtype)
        result[asked] = values
        if differences:
            one = np.ones(len(self), result.dtype)
            result *= np.array(as_trained({"chosen": one, "rejected": -one}, self.swapped)["chosen"])[:, None]
            return result
        both = as_trained({"chosen": result[:, ::2], "rejected": result[:, 1::2]}, self.swapped)
        return np.stack([both["chosen"], both["rejected"]], axis=2).reshape(result.shape)

    def reference_log_probs(
        self, policy: PolicyModel, title: str = "Reference log-probabilities", **options: Any
    ) -> np.ndarray:
        """Return (N, 2) reference log-probabilities of chosen and rejected in nats, by ``values``."""
        return self.values(_reference_log_probs, policy, title, **options)

    def state_differences(self, policy: PolicyModel) -> np.ndarray:
        """Return (N, H) ``reference_states``, chosen minus rejected, by ``values``."""
        return self.values(_mean_state_differences, policy, "Reference's states", differences=True)


def check_model(policy: PolicyModel, *splits: TokenizedPairs) -> None:
    """Check a policy on the longest and shortest pairs of all splits; choose attention and layout by them.

    Raises:
        UserError: it has too few positions or embeddings for the pairs, or cannot compute them.
    """
    for pairs in splits:
        prompt, augmented, chosen, rejected = part_lengths(pairs.rows, *_TOKENS)
        lengths = np.maximum(prompt, augmented) + np.maximum(chosen, rejected)
        largest = max(pairs.pad_id, largest_token(pairs.rows, *_TOKENS))
        check_tokens(policy.name, policy.model, lengths, largest)
    extremes = [row for pairs in splits for row in pairs.extremes()]
    batch = PairBatch.collate(*zip(*extremes, strict=True))
    policy.check(move_data_to_device(batch, policy.device))


def _reference_log_probs(policy: PolicyModel, batch: PairBatch) -> Tensor:
    log_probs = policy.reference_log_probs(batch)
    return torch.stack([log_probs.chosen, log_probs.rejected], dim=1)


def _mean_state_differences(policy: PolicyModel, batch: PairBatch) -> Tensor:
    chosen, rejected = policy.reference_states(batch).unbind(1)
    return chosen - rejected


def as_trained(columns: Mapping[str, Any], swapped: Sequence[bool]) -> dict[str, list[Any]]:
    """Return columns of N rows, with the other label where ``swapped``."""
    relabelled = {name: list(values) for name, values in columns.items()}
    for one, other in _SIDES:
        if one in columns:
            both = list(zip(columns[one], columns[other], swapped, strict=True))
            relabelled[one] = [second if swap else first for first, second, swap in both]
            relabelled[other] = [first if swap else second for first, second, swap in both]
    for name in columns.keys() & {"eta", "p_right"}:
        values = zip(columns[name], swapped, strict=True)
        relabelled[name] = [1 - p if swap and p is not None else p for p, swap in values]
    return relabelled


def token_parts(rows: Dataset, *columns: str) -> Iterator[tuple[list[pa.ListArray], list[np.ndarray]]]:
    """Yield, in parts that fit into memory, each column's lists of ids and their (n,) int64 lengths."""
    for part in rows.select_columns(list(columns)).with_format("arrow").iter(10_000):
        lists = [part[name].combine_chunks() for name in columns]
        yield lists, [compute.list_value_length(column).to_numpy().astype(np.int64) for column in lists]


def row_bytes(rows: Dataset, *columns: str) -> Iterator[list[bytes]]:
    """Yield each row's ids in each column, as bytes that can be compared."""
    for lists, counts in token_parts(rows, *columns):
        parts = [
            np.split(column.flatten().to_numpy(), np.cumsum(sizes)[:-1])
            for column, sizes in zip(lists, counts, strict=True)
        ]
        yield from ([part.tobytes() for part in row] for row in zip(*parts, strict=True))


def part_lengths(rows: Dataset, *columns: str) -> np.ndarray:
    """Return (C, N) int64 tokens of N > 0 rows in each of C columns."""
    return np.concatenate([np.stack(counts) for _, counts in token_parts(rows, *columns)], axis=1)


def lengths_and_digest(rows: Dataset, *columns: str) -> tuple[np.ndarray, str]:
    """Return (N,) tokens of each row over all columns, and a hash of all tokens in their order."""
    digest = hashlib.sha256()
    lengths = [np.empty(0, np.int64)]
    for lists, counts in token_parts(rows, *columns):
        for column, count in zip(lists, counts, strict=True):
            digest.update(count.tobytes())
            digest.update(column.flatten().to_numpy().tobytes())
        lengths.append(np.sum(counts, axis=0))
    return np.concatenate(lengths), digest.hexdigest()


def tokens_digest(rows: Dataset, *columns: str) -> str:
    """Return a hash of the tokens of all rows, in their order."""
    return lengths_and_digest(rows, *columns)[1]


def largest_token(rows: Dataset, *columns: str) -> int:
    """Return the largest token id of all rows."""
    lists = (column for part, _ in token_parts(rows, *columns) for column in part)
    return max(compute.max(column.flatten()).as_py() or 0 for column in lists)
