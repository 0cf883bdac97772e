"""Token layout of pairs, their attention masks, and log-probabilities at response positions only.

Two layouts of the same pairs:

* shared: a row is prompt + chosen + rejected. Each response attends to the prompt and to itself, and its
  positions continue the prompt's, so both responses are scored in one pass over the prompt.
* separate: prompt + chosen in the first N rows, prompt + rejected in the last N, under the model's own
  causal mask. Every model supports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from .batch import LogProbs, PairBatch, Segment

Mask = Tensor | dict[str, Tensor]


@dataclass
class Rows:
    """Model inputs of N pairs in R rows of T tokens, and where their K response tokens are predicted."""

    input_ids: Tensor
    """(R, T) int64."""
    position_ids: Tensor
    """(R, T) int64."""
    visible: Tensor
    """(R, T, T) bool, query i may look at key j; or (R, T) bool, token is no padding (plain causal rows)."""
    source: tuple[Tensor, Tensor]
    """Row and column (K,) of the hidden state that predicts each response token."""
    targets: Tensor
    """(K,) the response tokens."""
    owner: Tensor
    """(K,) pair of each response token; chosen 0..N-1, rejected N..2N-1."""
    pairs: int
    """N."""

    def log_probs(self, tokens: Tensor) -> LogProbs:
        """Sums (K,) token log-probabilities to one value a response."""
        sums = tokens.new_zeros(2 * self.pairs).index_add(0, self.owner, tokens)
        return LogProbs(sums[: self.pairs], sums[self.pairs :])


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

    same = segments[:, :, None] == segments[:, None, :]
    prompt_key = (segments == Segment.PROMPT)[:, None, :]
    causal = column[:, None] >= column[None, :]
    return Rows(
        input_ids=batch.input_ids,
        position_ids=positions,
        # `same` lets padding look at itself, which keeps its softmax finite; nobody looks at padding.
        visible=causal & (same | (prompt_key & is_response[:, :, None])),
        source=(row, source),
        targets=batch.input_ids[row, col],
        owner=torch.where(is_rejected[row, col], row + n, row),
        pairs=n,
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
    return Rows(input_ids, column, real, (row, col - 1), input_ids[row, col], row, n)


def attention_mask(rows: Rows, config: PretrainedConfig, dtype: torch.dtype) -> Mask:
    """What the transformer gets as ``attention_mask``.

    Plain causal rows pass their padding mask and leave the rest to the model. Shared rows pass a prepared
    (R, 1, T, T) mask, into which sliding windows (counted in positions, not columns) are cut; a model that
    mixes layer types gets a dict with a mask for each, as transformers expects.
    """
    if rows.visible.dim() == 2:
        return rows.visible.long()
    config = config.get_text_config()
    settings = config.to_dict()
    window, kinds = settings.get("sliding_window"), set(settings.get("layer_types") or ())

    def prepared(limit: int | None) -> Tensor:
        visible = rows.visible
        if limit is not None:
            distance = rows.position_ids[:, :, None] - rows.position_ids[:, None, :]
            visible = visible & (distance < limit)
        if config._attn_implementation == "eager":  # adds the mask to the scores
            scores = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            return scores.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
        return visible[:, None]

    limits = {"full_attention": None, "sliding_attention": window}
    if len(kinds) > 1 and kinds <= limits.keys():
        return {kind: prepared(limits[kind]) for kind in kinds}
    if kinds:
        return prepared(window if kinds == {"sliding_attention"} else None)
    return prepared(window)


def token_log_probs(
    hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, pieces: int, frozen: bool
) -> Tensor:
    """Log-probabilities of K target tokens.

    Args:
        hidden: (K, H) hidden states that predict them.
        head: maps (k, H) to logits (k, V).
        targets: (K,) token ids.
        pieces: into how many the rows are cut; the logits of one exist at a time. Where ZeRO-3 gathers the
            head for each, all ranks need the same number.
        frozen: nothing in ``head`` is trained. The gradient of each log-probability with respect to its
            hidden state is then computed along with it, and (K, H) kept; else backward repeats the logits.

    Returns:
        (K,) log-probabilities in nats, in at least fp32.
    """
    if hidden.requires_grad and frozen:
        return _FrozenHead.apply(hidden, targets, head, pieces)
    parts = []
    for h, t in zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
        if h.requires_grad:
            parts.append(checkpoint(_log_probs, head, h, t, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_log_probs(head, h, t))
    return torch.cat(parts)


def _log_probs(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    logits = upcast(head(hidden))
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)


class _FrozenHead(torch.autograd.Function):
    """Rows are independent, so the gradient of a piece's sum holds that of each of its log-probabilities."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], pieces: int
    ) -> Tensor:
        values, slopes = [], []
        for h, t in zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
            with torch.enable_grad():
                h = h.detach().requires_grad_()
                value = _log_probs(head, h, t)
                slopes += torch.autograd.grad(value.sum(), h)
            values.append(value.detach())
        ctx.save_for_backward(hidden, targets, torch.cat(slopes))
        ctx.head = head
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates twice, and the slopes depend on the states
            value = _log_probs(ctx.head, hidden, targets)
            (result,) = torch.autograd.grad(value, hidden, gradient, create_graph=True)
        else:
            result = (gradient[:, None] * slopes).to(hidden.dtype)
        return result, None, None, None


def upcast(x: Tensor) -> Tensor:
    """To fp32, except that float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
