"""torch's ``varlen_attn`` on a CPU too: by SDPA, a sequence at a time, as one operation, as on a GPU."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen


def looped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """Return ``varlen_attn``'s causal result for any dtype.

    Shapes are (T, H, D), (K, H', D) and (K, H', D); the window's right side is 0.
    """
    found = []
    spans = zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True)
    for (start, end), (first, last) in spans:
        queries, keys = end - start, last - first
        mask = None
        if queries != keys or -1 < window_size[0] < keys - 1:
            # The last query attends to the last key.
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril_(keys - queries)
            if window_size[0] > -1:
                mask.triu_(keys - queries - window_size[0])
        q, k, v = (x.transpose(0, 1)[None] for x in (query[start:end], key[first:last], value[first:last]))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


@varlen._varlen_attn.register_kernel("cpu")
def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention, and zeros for what the kernel keeps for its backward pass."""
    *heads, query_ends, key_ends, most_queries, most_keys, _, scale, window_size = inputs[:10]
    assert query_ends.dtype == key_ends.dtype == torch.int32, "as the GPU's kernel needs them"
    assert (query_ends.diff().max(), key_ends.diff().max()) == (most_queries, most_keys)
    found = looped_attention(*heads, query_ends, key_ends, scale=scale, window_size=window_size)
    return found, torch.zeros(found.shape[1], len(found)), torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward(gradient: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    ends, (scale, window_size) = inputs[5:7], inputs[11:13]

    def attend(*heads: Tensor) -> Tensor:
        return looped_attention(*heads, *ends, scale=scale, window_size=window_size)

    return torch.func.vjp(attend, *inputs[:3])[1](gradient)
