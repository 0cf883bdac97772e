"""Token layouts of preference pairs: what rows a model gets, and where it predicts the responses.

Three layouts of the same pairs:

* shared: a row is prompt + chosen + rejected. Each response attends to the prompt and to itself, and its
  positions continue the prompt's, so both responses are scored in one pass over the prompt.
* separate: prompt + chosen in the first N rows, prompt + rejected in the last N, under the model's own
  causal mask. Every model supports it.
* packed: the sequences of "separate" one after the other in a single row, without padding. Positions start
  anew with each, by which transformers keeps them apart; FlashAttention has a kernel for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import LogProbs, PairBatch, Segment
from ..numerics import wide

Layout = Literal["shared", "separate", "packed", "plain"]
"""How tokens are laid out; "plain" is "separate" with the model's own positions and whole logits."""


@dataclass
class Rows:
    """Model inputs of N pairs in R rows of T tokens, and where their K response tokens are predicted.

    One of ``segment_ids``, ``real`` and ``lengths`` says what a token may look at.
    """

    input_ids: Tensor
    """(R, T) int64."""
    position_ids: Tensor | None
    """(R, T) int64; None: the model counts them itself."""
    source: tuple[Tensor, Tensor]
    """Row and column (K,) of the hidden state that predicts each response token."""
    targets: Tensor
    """(K,) the response tokens."""
    owner: Tensor
    """(K,) pair of each response token; chosen 0..N-1, rejected N..2N-1."""
    token_pair: Tensor
    """(R, T) pair 0..N-1 of each token, padding with it."""
    pairs: int
    """N."""
    segment_ids: Tensor | None = None
    """(R, T) a ``Segment`` for each token: shared rows."""
    real: Tensor | None = None
    """(R, T) bool, the token is no padding: one sequence a row."""
    lengths: Tensor | None = None
    """(2N,) tokens of each sequence: all of them in one row."""
    whole_logits: bool = False
    """Take the model's own logits, which it may transform, and not its head's."""

    def log_probs(self, tokens: Tensor) -> LogProbs:
        """Sums (K,) values of the response tokens, such as log-probabilities, to one a response."""
        # Added up one by one in fp32, 50 tokens lose more than the model's own rounding.
        values = wide(tokens)
        sums = values.new_zeros(2 * self.pairs).index_add(0, self.owner, values).to(tokens.dtype)
        return LogProbs(sums[: self.pairs], sums[self.pairs :])


def rows_of(layout: Layout, batch: PairBatch) -> Rows:
    """The batch in a layout, its rows as long as the device likes them."""
    if layout == "packed":
        return packed_rows(batch)
    if layout == "plain":
        return replace(separate_rows(batch), position_ids=None, whole_logits=True)
    rows = shared_rows(batch) if layout == "shared" else separate_rows(batch)
    return padded(rows, row_multiple(batch.input_ids.device))


def row_multiple(device: torch.device) -> int:
    """What the length of rows should be a multiple of.

    On a GPU cuDNN's attention plans anew for each length that it has not seen, and other kernels are fastest
    on whole tiles. On a CPU more padding is only more to compute.
    """
    return 64 if device.type == "cuda" else 1


def padded(rows: Rows, multiple: int) -> Rows:
    """The same rows, padded on the right to a multiple of a length."""
    count, length = rows.input_ids.shape
    more = -length % multiple
    if not more:
        return rows

    longer: dict[str, Any] = {
        name: F.pad(values, (0, more))  # with 0, which every model has
        for name in ("input_ids", "position_ids", "segment_ids", "real")
        if (values := getattr(rows, name)) is not None
    }
    owners = torch.cat([rows.token_pair, rows.token_pair[:, -1:].expand(count, more)], dim=1)
    return replace(rows, **longer, token_pair=owners)


def shared_rows(batch: PairBatch) -> Rows:
    """One row a pair."""
    segments = batch.segment_ids
    n, length = segments.shape
    column = torch.arange(length, device=segments.device)
    prompt_length = (segments == Segment.PROMPT).sum(1, keepdim=True)
    chosen_length = (segments == Segment.CHOSEN).sum(1, keepdim=True)
    is_rejected = segments == Segment.REJECTED
    positions = torch.where(is_rejected, column - chosen_length, column)

    is_response = (segments == Segment.CHOSEN) | is_rejected
    row, col = is_response.nonzero(as_tuple=True)
    # The first token of either response is predicted from the prompt's last token.
    first = positions[row, col] == prompt_length[row, 0]
    source = torch.where(first, prompt_length[row, 0] - 1, col - 1)
    return Rows(
        input_ids=batch.input_ids,
        position_ids=positions,
        source=(row, source),
        targets=batch.input_ids[row, col],
        owner=torch.where(is_rejected[row, col], row + n, row),
        token_pair=torch.arange(n, device=segments.device)[:, None].expand(n, length),
        pairs=n,
        segment_ids=segments,
    )


def separate_rows(batch: PairBatch) -> Rows:
    """Two rows a pair: the N chosen ones, then the N rejected ones, padded on the right."""
    segments, n = batch.segment_ids, len(batch)
    columns, masks = [], []
    for other in (Segment.REJECTED, Segment.CHOSEN):
        keep = (segments != other) & (segments != Segment.PAD)
        # A stable sort moves the kept tokens to the left without changing their order.
        columns.append(torch.sort((~keep).to(torch.int8), dim=1, stable=True).indices)
        masks.append(keep.sum(1))
    length = int(torch.stack(masks).max())
    index = torch.cat(columns)[:, :length]
    lengths = torch.cat(masks)
    real = torch.arange(length, device=segments.device) < lengths[:, None]
    rows = torch.arange(2 * n, device=segments.device) % n
    prompt_length = (segments == Segment.PROMPT).sum(1)[rows]
    column = torch.arange(length, device=segments.device).expand(2 * n, -1)
    input_ids = torch.where(real, batch.input_ids[rows[:, None], index], 0)
    row, col = (real & (column >= prompt_length[:, None])).nonzero(as_tuple=True)
    return Rows(
        input_ids=input_ids,
        position_ids=column,
        source=(row, col - 1),
        targets=input_ids[row, col],
        owner=row,
        token_pair=rows[:, None].expand(2 * n, length),
        pairs=n,
        real=real,
    )


def packed_rows(batch: PairBatch) -> Rows:
    """A single row: the N chosen sequences, then the N rejected ones."""
    padded = separate_rows(batch)
    real, positions = padded.real, padded.position_ids
    assert real is not None and positions is not None
    lengths = real.sum(1)
    starts = lengths.cumsum(0) - lengths
    row, col = padded.source
    return Rows(
        input_ids=padded.input_ids[real][None],
        position_ids=positions[real][None],
        source=(torch.zeros_like(row), starts[row] + col),
        targets=padded.targets,
        owner=padded.owner,
        token_pair=padded.token_pair[real][None],
        pairs=padded.pairs,
        lengths=lengths,
    )
