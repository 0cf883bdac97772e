"""Attention masks: which tokens see which where two responses share their prompt, and for other layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PretrainedConfig

from ..batch import Segment
from .attention import FLEX, is_flash
from .rows import Rows

Mask = Tensor | BlockMask
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of row, head, query and key: whether the query may look at the key. A ``mask_mod`` of FlexAttention."""


def attention_inputs(rows: Rows, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the transformer's forward beside tokens and positions.

    Plain causal rows pass their padding mask and leave the rest to the model. A packed row has none: models
    find the sequences by their positions, FlashAttention by their lengths. Shared rows pass a prepared mask.
    """
    if rows.real is not None:
        return {"attention_mask": rows.real.long()}
    if rows.lengths is None:
        return {"attention_mask": shared_mask(rows, config, dtype)}
    inputs: dict[str, Any] = {"attention_mask": None}
    if is_flash(config.get_text_config()._attn_implementation):
        # Given once, since every layer would read them off the positions, and wait for the device.
        ends = torch.nn.functional.pad(rows.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        longest = int(rows.lengths.max())
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        inputs |= {"max_length_q": longest, "max_length_k": longest}
    return inputs


def shared_mask(rows: Rows, config: PretrainedConfig, dtype: torch.dtype) -> Mask | dict[str, Mask]:
    """A prepared mask of shared rows, (R, 1, T, T), in the form that the attention implementation takes.

    Sliding windows, counted in positions and not in columns, are cut into it; a model that mixes layer types
    gets a dict with a mask for each, as transformers expects.
    """
    config = config.get_text_config()
    settings = config.to_dict()
    window, kinds = settings.get("sliding_window"), set(settings.get("layer_types") or ())
    segments, positions = rows.segment_ids, rows.position_ids
    assert segments is not None and positions is not None
    count, length = rows.input_ids.shape
    device = rows.input_ids.device

    def prepared(limit: int | None) -> Mask:
        visible = _visible(segments, positions, limit)
        if config._attn_implementation == FLEX:
            return create_block_mask(visible, count, None, length, length, device)
        row, column = torch.arange(count, device=device), torch.arange(length, device=device)
        dense = visible(row[:, None, None, None], row, column[:, None], column)
        # What is added to the scores; of a boolean mask SDPA would make that in every layer anew.
        scores = torch.zeros(dense.shape, dtype=dtype, device=device)
        return scores.masked_fill_(~dense, torch.finfo(dtype).min)

    limits = {"full_attention": None, "sliding_attention": window}
    if len(kinds) > 1 and kinds <= limits.keys():
        return {kind: prepared(limits[kind]) for kind in kinds}
    if kinds:
        return prepared(window if kinds == {"sliding_attention"} else None)
    return prepared(window)


def _visible(segments: Tensor, positions: Tensor, limit: int | None) -> Visible:
    prompt = int(Segment.PROMPT)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, other = segments[row, query], segments[row, key]
        # Padding looks at itself, which keeps its softmax finite; nobody else looks at padding.
        seen = (query >= key) & ((own == other) | ((other == prompt) & (own > prompt)))
        if limit is not None:
            seen = seen & (positions[row, query] - limit < positions[row, key])
        return seen

    return visible
