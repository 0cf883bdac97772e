"""Attention of packed pairs with shared prompts: two sequences a pair, without padding or a mask.

The first has prompt + chosen as queries and keys; the second has rejected as queries, and prompt + rejected
as keys. The last query of a sequence attends to all of its keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

VARLEN = "varlen"
"""Name of this attention among transformers' implementations."""
HALF = (torch.float16, torch.bfloat16)
"""Data types of FlashAttention's kernels."""
# torch 2.11 accepts fewer key heads than query heads as they are, later versions on request only.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of transformers' attention functions that change scores."""


@dataclass
class Packing:
    """The 2N sequences of N pairs in one row of T tokens."""

    keys: Tensor
    """(K,) columns of the sequences' keys, K = T + all prompts' tokens."""
    query_ends: Tensor
    """(2N + 1,) int32 cumulative number of queries."""
    key_ends: Tensor
    """(2N + 1,) int32 cumulative number of keys."""
    longest: tuple[int, int]
    """Largest number of queries and of keys."""
    first: Tensor
    """(T,) place of each column among the keys; of two, the one in its pair's first sequence."""
    prompts: Tensor
    """(K - T,) columns of the prompts."""
    second: Tensor
    """(K - T,) places of these in the second sequences."""

    @classmethod
    def of(cls, lengths: Tensor) -> Packing:
        """Return the sequences of pairs with (N, 3) lengths of prompt, chosen and rejected."""
        device, lengths = lengths.device, lengths.cpu()  # many small operations, which a GPU would wait for
        prompt, chosen, rejected = lengths.T
        queries = torch.stack([prompt + chosen, rejected], dim=1).flatten()
        counts = torch.stack([prompt + chosen, prompt + rejected], dim=1).flatten()
        starts = queries.cumsum(0)[1::2] - lengths.sum(1)
        # A key's column is its place in its sequence, moved by what precedes: for rejected, chosen too.
        sequence = torch.arange(len(counts)).repeat_interleave(counts)
        place = torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]
        pair = sequence // 2
        skipped = torch.where((sequence % 2 == 1) & (place >= prompt[pair]), chosen[pair], 0)
        query_ends, key_ends = (F.pad(n.cumsum(0, dtype=torch.int32), (1, 0)) for n in (queries, counts))
        most_queries, most_keys = torch.stack([queries.max(), counts.max()]).tolist()
        keys = starts[pair] + place + skipped
        again = (sequence % 2 == 1) & (place < prompt[pair])
        own, second = (~again).nonzero()[:, 0], again.nonzero()[:, 0]
        first = torch.empty_like(own).index_copy_(0, keys[own], own)
        keys, query_ends, key_ends, first, prompts, second = (
            x.to(device) for x in (keys, query_ends, key_ends, first, keys[second], second)
        )
        return cls(keys, query_ends, key_ends, (most_queries, most_keys), first, prompts, second)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the (1, T, H, D) attention of packed pairs; without ``packing``, of the mask by SDPA.

    An attention function of transformers, of (1, H, T, D); ``key`` and ``value`` may have fewer heads.

    Raises:
        ValueError: the model's scores have a bias or a cap.
    """
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if changed := [name for name in _UNSUPPORTED if options.get(name) is not None]:
        raise ValueError(f"this attention has no {changed[0]}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = options.get("sliding_window")
    attend: Callable[..., Any] = varlen_attn
    attention = attend(
        q,
        _Keys.apply(k, packing),
        _Keys.apply(v, packing),
        packing.query_ends,
        packing.key_ends,
        *packing.longest,
        scale=options.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        **(_GROUPED if k.shape[1] != q.shape[1] else {}),
    )
    return attention[None], None


class _Keys(torch.autograd.Function):
    """(K, H, D) of (T, H, D); indexing's own gradient would sort the columns in every layer."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return columns.index_select(0, packing.keys)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        packing = ctx.packing
        columns = gradient.index_select(0, packing.first)
        prompts = columns.index_select(0, packing.prompts) + gradient.index_select(0, packing.second)
        return columns.index_copy_(0, packing.prompts, prompts), None


ALL_ATTENTION_FUNCTIONS.register(VARLEN, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(VARLEN, sdpa_mask)
