"""What torch's ``varlen_attn`` computes on a GPU, by SDPA on any device and dtype."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def looped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    *longest: int,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, 0),
    enable_gqa: bool = True,
) -> Tensor:
    """Return ``varlen_attn``'s causal result by SDPA, a sequence at a time, on any device and dtype.

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
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


LIBRARY = torch.library.Library("tests", "DEF")
INPUTS = "Tensor query, Tensor key, Tensor value, Tensor query_ends, Tensor key_ends, float scale"
LIBRARY.define(f"attention({INPUTS}) -> Tensor")
LIBRARY.define(f"attention_backward(Tensor gradient, {INPUTS}) -> (Tensor, Tensor, Tensor)")


def _forward(*inputs: Tensor | float) -> Tensor:
    return looped_attention(*inputs[:5], scale=inputs[5])


def _backward(gradient: Tensor, *inputs: Tensor | float) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        heads = [x.detach().requires_grad_() for x in inputs[:3]]
        return torch.autograd.grad(_forward(*heads, *inputs[3:]), heads, gradient)


LIBRARY.impl("attention", _forward, "CPU")
LIBRARY.impl("attention", lambda *inputs: torch.empty_like(inputs[0]), "Meta")
LIBRARY.impl("attention_backward", _backward, "CPU")
LIBRARY.impl("attention_backward", lambda _, *inputs: tuple(map(torch.empty_like, inputs[:3])), "Meta")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.scale = inputs[5]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.tests.attention_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None, None


torch.library.register_autograd("tests::attention", _gradients, setup_context=_save, lib=LIBRARY)


def opaque_attention(*inputs: Tensor, scale: float, **_: object) -> Tensor:
    """``looped_attention`` as one operation, into which a compiler does not look, as the GPU's kernel is."""
    return torch.ops.tests.attention(*inputs[:5], scale)
