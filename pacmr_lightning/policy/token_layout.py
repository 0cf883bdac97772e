"""Token layouts of preference pairs, their masks, and where responses are predicted.

* shared: a row is prompt + chosen + rejected. Each response attends to the prompt and itself, and its
  positions continue the prompt's. On GPUs they are "packed" where that is possible: all pairs in one row
  without padding, kept apart by an attention of their own.
* separate: prompt + chosen in the first N rows, prompt + rejected in the last N. Every model supports it.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from ..batch import LogProbs, PairBatch, Segment
from .packed_attention import VARLEN, Packing

TILES = {"cuda": 64}
"""Multiple of rows' lengths by device: GPU kernels prefer whole tiles, and cuDNN plans for each length."""
Layout = Literal["shared", "packed", "separate", "plain"]
"""Layout of tokens; "plain" is "separate" with the model's own positions and whole logits."""


@dataclass
class Rows:
    """Model inputs of N pairs in R rows of T tokens, and sources of their K response tokens.

    One of ``segment_ids``, ``real`` and ``packing`` defines the mask.
    """

    input_ids: Tensor
    """(R, T) int64."""
    position_ids: Tensor
    """(R, T) int64."""
    source: tuple[Tensor, Tensor]
    """(K,) row and column of the hidden state that predicts each response token."""
    targets: Tensor
    """(K,) response tokens."""
    owner: Tensor
    """(K,) pair of each response token; chosen 0..N-1, rejected N..2N-1."""
    token_pair: Tensor
    """(R, T) pair 0..N-1 of each token, including padding."""
    pairs: int
    """N."""
    segment_ids: Tensor | None = None
    """(R, T) ``Segment`` of each token, of shared rows."""
    real: Tensor | None = None
    """(R, T) bool, not padding, of separate rows."""
    packing: Packing | None = None
    """Sequences of the row of packed pairs."""
    whole_logits: bool = False
    """Use the model's own logits, which it may transform, and its own positions."""

    def attention_inputs(self, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Return the transformer's forward arguments other than tokens and positions."""
        if self.real is not None:
            return {"attention_mask": self.real.long()}
        if self.packing is not None:
            assert config.get_text_config()._attn_implementation == VARLEN
            # transformers makes no mask where it is given one with 4 dimensions; this one is not used.
            return {"attention_mask": self.input_ids.new_zeros(1, 1, 1, 1), "packing": self.packing}
        return {"attention_mask": shared_mask(self, config, dtype)}

    def log_probs(self, tokens: Tensor) -> LogProbs:
        """Sum (K,) values of the response tokens by response."""
        # In fp32, adding 50 tokens loses more than the model's own rounding.
        values = wide(tokens)
        sums = values.new_zeros(2 * self.pairs).index_add(0, self.owner, values).to(tokens.dtype)
        return LogProbs(sums[: self.pairs], sums[self.pairs :])

    def unpacked(self, tokens: Tensor) -> Tensor:
        """Return (RT, n) values of all tokens as (R, T, n); those of packed rows as zero-padded (N, L, n)."""
        tokens = tokens.unflatten(0, self.token_pair.shape)
        if len(tokens) % self.pairs == 0:
            return tokens
        column, longest = self._places
        padded = tokens.new_zeros(self.pairs, longest, tokens.shape[2])
        padded[self.token_pair[0], column] = tokens[0]
        return padded

    @cached_property
    def _places(self) -> tuple[Tensor, int]:
        """(T,) number of a packed row's tokens within their pairs, and the largest number of tokens."""
        counts = F.one_hot(self.token_pair[0], self.pairs).cumsum(0)
        return counts.gather(1, self.token_pair[0][:, None])[:, 0] - 1, int(counts[-1].max())


def rows_of(layout: Layout, batch: PairBatch) -> Rows:
    """Return the batch in a layout, padded for its device."""
    if layout == "packed":
        return packed_rows(batch)
    if layout == "plain":
        return replace(separate_rows(batch), whole_logits=True)
    rows = shared_rows(batch) if layout == "shared" else separate_rows(batch)
    return padded(rows)


def alone_rows(batch: PairBatch) -> list[Rows]:
    """Each of N chosen, then N rejected sequences on its own, as "plain"; each is the chosen of one pair."""
    rows = separate_rows(batch)
    assert rows.real is not None
    alone = []
    for place, length in enumerate(rows.real.sum(1).tolist()):
        own = rows.owner == place
        column = rows.source[1][own]
        first = torch.zeros_like(column)
        names = ("input_ids", "position_ids", "token_pair", "real")
        cut: dict[str, Any] = {name: getattr(rows, name)[place : place + 1, :length] for name in names}
        cut |= {"source": (first, column), "targets": rows.targets[own], "owner": first, "pairs": 1}
        alone.append(replace(rows, **cut, whole_logits=True))
    return alone


def padded(rows: Rows) -> Rows:
    """Pad rows on the right to a multiple of their device's."""
    count, length = rows.input_ids.shape
    more = -length % TILES.get(rows.input_ids.device.type, 1)
    if not more:
        return rows

    longer: dict[str, Any] = {
        name: F.pad(values, (0, more))  # 0 is a valid id of every model
        for name in ("input_ids", "position_ids", "segment_ids", "real")
        if (values := getattr(rows, name)) is not None
    }
    owners = torch.cat([rows.token_pair, rows.token_pair[:, -1:].expand(count, more)], dim=1)
    return replace(rows, **longer, token_pair=owners)


def shared_rows(batch: PairBatch) -> Rows:
    """One row per pair."""
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


def shared_mask(rows: Rows, config: PretrainedConfig, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Return the (R, 1, T, T) mask of shared rows; a dict for mixed layer types.

    Sliding windows count positions, not columns.
    """
    config = config.get_text_config()
    settings = config.to_dict()
    window, kinds = settings.get("sliding_window"), set(settings.get("layer_types") or ())
    segments, positions = rows.segment_ids, rows.position_ids
    assert segments is not None and positions is not None
    count, length = rows.input_ids.shape
    device = rows.input_ids.device
    prompt = int(Segment.PROMPT)

    row = torch.arange(count, device=device)[:, None, None, None]
    column = torch.arange(length, device=device)
    query, key = column[:, None], column
    own, other = segments[row, query], segments[row, key]
    # Padding attends to itself only, which keeps its softmax finite.
    seen = (query >= key) & ((own == other) | ((other == prompt) & (own > prompt)))

    def prepared(limit: int | None) -> Tensor:
        near = True if limit is None else positions[row, query] - limit < positions[row, key]
        # Additive: SDPA would convert a boolean mask in every layer.
        scores = torch.zeros(seen.shape, dtype=dtype, device=device)
        return scores.masked_fill_(~(seen & near), torch.finfo(dtype).min)

    limits = {"full_attention": None, "sliding_attention": window}
    if len(kinds) > 1 and kinds <= limits.keys():
        return {kind: prepared(limits[kind]) for kind in kinds}
    return prepared(None if kinds and kinds != {"sliding_attention"} else window)


def separate_rows(batch: PairBatch) -> Rows:
    """Two rows per pair: N chosen, then N rejected, right-padded."""
    segments, n = batch.segment_ids, len(batch)
    columns, masks = [], []
    for other in (Segment.REJECTED, Segment.CHOSEN):
        keep = (segments != other) & (segments != Segment.PAD)
        # A stable sort moves kept tokens to the left in order.
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
        # Padding has the last position, for rotary frequencies may depend on a row's largest.
        position_ids=torch.minimum(column, lengths[:, None] - 1),
        source=(row, col - 1),
        targets=input_ids[row, col],
        owner=row,
        token_pair=rows[:, None].expand(2 * n, length),
        pairs=n,
        real=real,
    )


def packed_rows(batch: PairBatch) -> Rows:
    """A single row: prompt, chosen and rejected of each pair."""
    rows = shared_rows(batch)
    real = batch.segment_ids != Segment.PAD
    column = real.flatten().cumsum(0).view_as(real) - 1
    row, col = rows.source
    return replace(
        rows,
        input_ids=rows.input_ids[real][None],
        position_ids=rows.position_ids[real][None],
        source=(torch.zeros_like(row), column[row, col]),
        token_pair=rows.token_pair[real][None],
        segment_ids=None,
        packing=Packing.of(batch.sizes),
    )


def wide(values: Tensor) -> Tensor:
    """Cast to float64 for exact sums, except on MPS, which lacks it."""
    return values if values.device.type == "mps" else values.double()
