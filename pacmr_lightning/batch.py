"""Batches of preference pairs.

A pair is one row of tokens, ``prompt + chosen + rejected``, so the prompt is stored and computed once.
``policy/token_layout.py`` makes position ids and a mask: a response sees the prompt and itself only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain

import torch
from torch import Tensor

from .errors import UserError


class Segment(IntEnum):
    """Part of a row that a token belongs to."""

    PAD = 0
    PROMPT = 1
    CHOSEN = 2
    REJECTED = 3


UNKNOWN = -1
"""Value of ``PairBatch.flipped`` where it is unknown whether the label was flipped."""


@dataclass
class LogProbs:
    """Sums of the log-probabilities of the response tokens (EOS included) of N pairs, in nats."""

    chosen: Tensor
    """(N,) log pi(chosen | prompt)."""
    rejected: Tensor
    """(N,) log pi(rejected | prompt)."""

    def detach(self) -> LogProbs:
        """Return the same values outside the autograd graph."""
        return LogProbs(self.chosen.detach(), self.rejected.detach())

    def exchanged(self) -> LogProbs:
        """Return the values with chosen and rejected swapped."""
        return LogProbs(self.rejected, self.chosen)

    def __getitem__(self, rows: slice | Tensor) -> LogProbs:
        return LogProbs(self.chosen[rows], self.rejected[rows])

    @staticmethod
    def cat(parts: Sequence[LogProbs]) -> LogProbs:
        """Concatenate micro-batches."""
        return LogProbs(torch.cat([p.chosen for p in parts]), torch.cat([p.rejected for p in parts]))


@dataclass(frozen=True)
class TokenBudget:
    """Most tokens of a micro-batch: those of ``PairBatch.token_count``."""

    tokens: int


MicroBatchSize = int | TokenBudget | None
"""Most pairs of a micro-batch, or most tokens; None for the whole batch."""


@dataclass
class PairBatch:
    """N preference pairs, one row of tokens each, padded on the right to L tokens."""

    ids: list[str]
    """N pair ids, as in the data rows."""
    input_ids: Tensor
    """(N, L) int64 token ids: prompt, chosen with its EOS, rejected with its EOS, padding."""
    segment_ids: Tensor
    """(N, L) int64, a ``Segment`` for each token."""
    flipped: Tensor
    """(N,) int64: 1 flipped, 0 not flipped, -1 unknown."""
    eta: Tensor | None = None
    """(N,) float32 probability that the response in the chosen place is better, NaN if unknown."""
    reference: LogProbs | None = None
    """Log-probabilities of the reference, if computed already."""
    augmented: PairBatch | None = None
    """The same pairs under augmented prompts (meta-batches only)."""
    annotators: list[str | None] | None = None
    """N annotators, None where unknown; None if all are unknown."""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> PairBatch:
        """Return some rows (a slice or a 1-D tensor of indices), without padding that only others need."""
        places = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        ids = [self.ids[i] for i in places]
        segments = self.segment_ids[rows]
        length = int((segments != Segment.PAD).sum(1).max()) if len(ids) else 0
        return PairBatch(
            ids=ids,
            input_ids=self.input_ids[rows, :length],
            segment_ids=segments[:, :length],
            flipped=self.flipped[rows],
            eta=None if self.eta is None else self.eta[rows],
            reference=None if self.reference is None else self.reference[rows],
            augmented=None if self.augmented is None else self.augmented[rows],
            annotators=None if self.annotators is None else [self.annotators[i] for i in places],
        )

    def micro_batches(self, size: MicroBatchSize) -> Iterator[PairBatch]:
        """Yield slices in order, each as large as ``size`` allows; rows by falling length need least padding.

        Raises:
            UserError: a pair has more tokens than a token budget.
        """
        if isinstance(size, TokenBudget):
            yield from self._by_tokens(size.tokens)
            return
        size = size or max(len(self), 1)
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def _by_tokens(self, budget: int) -> Iterator[PairBatch]:
        start = tokens = 0
        for place, length in enumerate((self.segment_ids != Segment.PAD).sum(1).tolist()):
            if length > budget:
                raise UserError(
                    f"The pair {self.ids[place]} has {length} tokens, but micro_batch_tokens is {budget}; "
                    f"set it to {length} or more."
                )
            if tokens + length > budget:
                yield self[start:place]
                start, tokens = place, 0
            tokens += length
        if start < len(self):
            yield self[start:]

    def with_reference(self, reference: LogProbs) -> PairBatch:
        """Return the batch with the reference's log-probabilities."""
        return replace(self, reference=reference)

    @property
    def sizes(self) -> Tensor:
        """(N, 3) tokens of prompt, chosen and rejected."""
        return torch.stack([(self.segment_ids == part).sum(1) for part in list(Segment)[1:]], dim=1)

    @property
    def lengths(self) -> Tensor:
        """(N, 2) tokens of a pair's row, and of the longer of its two sequences."""
        sizes = self.sizes
        return torch.stack([sizes.sum(1), sizes[:, 0] + sizes[:, 1:].amax(1)], dim=1)

    def extremes(self) -> PairBatch:
        """Return the pairs with the longest row, the longest sequence and the shortest row, in this order."""
        row, sequence = self.lengths.cpu().T
        places = dict.fromkeys(int(i) for i in (row.argmax(), sequence.argmax(), row.argmin()))
        return self[torch.tensor(list(places))]

    @property
    def token_count(self) -> int:
        """Tokens of all rows without padding (a shared prompt counts once)."""
        return int((self.segment_ids != Segment.PAD).sum())

    @classmethod
    def collate(
        cls,
        ids: Sequence[str],
        prompts: Sequence[Sequence[int]],
        chosen: Sequence[Sequence[int]],
        rejected: Sequence[Sequence[int]],
        *,
        flipped: Sequence[int | bool | None] | None = None,
        eta: Sequence[float | None] | None = None,
        annotators: Sequence[str | None] | None = None,
        pad_id: int = 0,
    ) -> PairBatch:
        """Return N tokenized pairs as one batch, padded with ``pad_id``.

        >>> prompts, chosen, rejected = [[5, 6], [5]], [[7, 2], [9, 2]], [[8, 8, 2], [2]]
        >>> batch = PairBatch.collate(["a", "b"], prompts, chosen, rejected)
        >>> batch.input_ids
        tensor([[5, 6, 7, 2, 8, 8, 2],
                [5, 9, 2, 2, 0, 0, 0]])
        >>> batch.segment_ids  # 1 prompt, 2 chosen, 3 rejected, 0 padding
        tensor([[1, 1, 2, 2, 3, 3, 3],
                [1, 2, 2, 3, 0, 0, 0]])

        A prompt has at least one token, from which the first response token is predicted; responses end in
        EOS. ``flipped``, ``eta`` and ``annotators`` have None where unknown, and are None if all are.
        """
        parts = list(zip(prompts, chosen, rejected, strict=True))
        lengths = torch.tensor([[len(part) for part in t] for t in parts], dtype=torch.long).view(-1, 3)
        ends = lengths.sum(1)
        real = torch.arange(int(ends.max()) if parts else 0) < ends[:, None]
        input_ids = torch.full(real.shape, pad_id, dtype=torch.long)
        segment_ids = torch.full(real.shape, int(Segment.PAD), dtype=torch.long)
        # Row by row and part by part, in the order of the mask.
        tokens = chain.from_iterable(chain.from_iterable(parts))
        input_ids[real] = torch.tensor(list(tokens), dtype=torch.long)
        kinds = torch.tensor([Segment.PROMPT, Segment.CHOSEN, Segment.REJECTED]).repeat(len(parts))
        segment_ids[real] = kinds.repeat_interleave(lengths.flatten())
        flags = [UNKNOWN if f is None else int(f) for f in (flipped or [None] * len(parts))]
        known = [math.nan if e is None else e for e in (eta or [None] * len(parts))]
        about = torch.tensor(flags, dtype=torch.long), torch.tensor(known)
        who = None if annotators is None else list(annotators)
        return cls(list(ids), input_ids, segment_ids, *about, annotators=who)


@dataclass
class TrainingBatch:
    """Batches of a training step: a train batch, and a meta-batch when a VNet update is due."""

    train: PairBatch
    """This rank's share of one optimizer step, longest first, so that micro-batches need little padding."""
    meta: PairBatch | None = None
    """This rank's share of one outer step; ``augmented`` for prompt-augmentation consistency."""
