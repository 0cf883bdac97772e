"""LoRA layers that compute in a half-precision base's dtype, on weights that stay fp32.

PEFT casts each layer's input to the adapter's fp32, and adds an fp32 output to the base's. On a GPU this
memory traffic may take longer than the base's own product. Here A and B are cast down instead, as under
autocast, and products are accumulated in fp32. Three things differ from autocast: B's product is added into
the base's output before that is rounded, the weights' gradients are not rounded, and a shift of the weights
(``HalfLinear.shift``) is a product of its own, since most of it would vanish in the rounded sum of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .lora import ADAPTER

LoraDtype = Literal["float32", "base"]
BF16 = torch.bfloat16


def compute_in_base_dtype(layers: Iterable[LoraLayer]) -> None:
    """Have LoRA layers compute in bf16 where their input is; prints which kinds of layers do not."""
    others = set()
    for layer in layers:
        if not isinstance(layer, (lora.Linear, getattr(lora, "Linear4bit", lora.Linear))):
            others.add(type(layer).__name__)
            continue
        layer.__class__ = _in_base_dtype(type(layer))
        layer.lora_A[ADAPTER].__class__, layer.lora_B[ADAPTER].__class__ = _Down, _Up
    if others:
        rank_zero_info(
            f"LoRA layers of the kind {', '.join(sorted(others))} compute in float32; lora_compute_dtype "
            "base is for linear layers."
        )


@contextmanager
def in_float32(layers: Iterable[LoraLayer]) -> Iterator[None]:
    """Inside, LoRA layers compute as PEFT's, for comparisons that rounding in half precision would drown."""
    own: dict[LoraLayer, Any] = {x: type(x) for x in layers if type(x).__module__ == __name__}
    try:
        for layer, kind in own.items():
            layer.__class__ = kind.__base__
        yield
    finally:
        for layer, kind in own.items():
            layer.__class__ = kind


def without_gradient(linear: HalfLinear) -> RemovableHandle:
    """Do not compute the weight's gradient until the handle's ``remove``."""
    return linear.register_forward_pre_hook(
        lambda module, inputs, others: (inputs, {**others, "learns": False}), with_kwargs=True
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product (batched for 3 dimensions) in the operands' dtype; of bf16 ones in fp32, unrounded."""
    if a.dtype != BF16:
        return a @ b
    # torch does not differentiate it.
    if a.is_cuda and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def weight_gradient(linear: nn.Linear, x: Tensor, gradient: Tensor) -> Tensor:
    """Return the (R, out, in) gradients of a linear's weight by row, in its dtype.

    Args:
        linear: A or B of a LoRA layer.
        x: (R, T, in) inputs.
        gradient: (R, T, out) of the outputs.
    """
    half = isinstance(linear, HalfLinear) and BF16 in (x.dtype, gradient.dtype)
    dtype = BF16 if half else linear.weight.dtype
    return product(gradient.to(dtype).transpose(1, 2), x.to(dtype))


class HalfLinear(nn.Linear):
    """A or B of a LoRA layer, whose weight is wider than what it computes with."""

    shift: Tensor | None = None
    """S of the weight W + S that it computes with, which is not added up in half precision."""


class _Down(HalfLinear):
    """(..., n) to (..., r); fp32 if the input is bf16."""

    def forward(self, x: Tensor, learns: bool = True) -> Tensor:
        return _DownProduct.apply(x, self.weight, self.shift, learns)


class _Up(HalfLinear):
    """(..., r) to (..., n), added to ``base`` in its dtype, in place if possible."""

    def forward(self, x: Tensor, base: Tensor | None = None, learns: bool = True) -> Tensor:
        base = x.new_zeros(*x.shape[:-1], self.out_features) if base is None else base
        return _UpProduct.apply(x, base, self.weight, self.shift, learns)


@cache
def _in_base_dtype(kind: Any) -> type[LoraLayer]:
    """Return a subclass of PEFT's ``kind`` that computes in bf16 where input and base do."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        fits = x.dtype == BF16 and self.active_adapters == [ADAPTER] and not (args or kwargs)
        if not fits or self.disable_adapters or self.merged:
            return kind.forward(self, x, *args, **kwargs)
        down, up, scaling = self.lora_A[ADAPTER], self.lora_B[ADAPTER], self.scaling[ADAPTER]
        if not (_changed(down) or _changed(up)):
            return _Product.apply(x, self.base_layer(x), down.weight, up.weight, scaling)
        return up(down(x) * scaling, self.base_layer(x))

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})


def _to_rank(x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    """(T, r) of (T, n) x and (n, r) weights; fp32 if x is bf16."""
    found = product(x, weight.to(x.dtype))
    return found if shift is None else found + product(x, shift.to(x.dtype))


def _from_rank(x: Tensor, weight: Tensor, shift: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors in ``dtype`` whose product is that of (T, r) x and (r, n) weights, rounded once."""
    if shift is not None:
        x, weight = torch.cat([x, x], 1), torch.cat([weight, shift])
    return x.to(dtype), weight.to(dtype)


def _changed(linear: HalfLinear) -> bool:
    return bool(linear._forward_hooks or linear._forward_pre_hooks) or linear.shift is not None


def _writable(ctx: Any, base: Tensor) -> Tensor:
    """Return the base's output, or a copy where it may not be written."""
    # Out of place addmm copies it first. Autograd refuses some views.
    if torch.compiler.is_compiling() or base._is_view() or not base.is_contiguous():
        return base.clone(memory_format=torch.contiguous_format)
    ctx.mark_dirty(base)
    return base


class _Product(torch.autograd.Function):
    """A and B without hooks or shift, in one node: calls of operations are most of a small model's time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        down, up, rows = a.to(x.dtype), (scaling * b).to(x.dtype), x.flatten(0, -2)
        h = rows @ down.T
        ctx.save_for_backward(x, a, b, down, up, h)
        ctx.scaling = scaling
        base = _writable(ctx, base)
        base.view(-1, base.shape[-1]).addmm_(h, up.T)
        return base

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, down, up, h = ctx.saved_tensors
        g, rows, gx, ga, gb = gradient.flatten(0, -2), x.flatten(0, -2), None, None, None
        if torch.is_grad_enabled():  # this gradient is differentiated too
            down, up = a.to(x.dtype), (ctx.scaling * b).to(x.dtype)
            h = rows @ down.T
        gh = g @ up
        if ctx.needs_input_grad[0]:
            gx = (gh @ down).view_as(x)
        if ctx.needs_input_grad[2]:
            ga = product(gh.T, rows)
        if ctx.needs_input_grad[3]:
            gb = ctx.scaling * product(g.T, h)
        return gx, gradient, ga, gb, None


class _DownProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shift: Tensor | None, learns: bool) -> Tensor:
        ctx.save_for_backward(x, weight, shift)
        ctx.learns = learns
        moved = None if shift is None else shift.T
        return _to_rank(x.flatten(0, -2), weight.T, moved).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, shift = ctx.saved_tensors
        g, gx, gw = gradient.flatten(0, -2), None, None
        if ctx.needs_input_grad[0]:
            a, b = _from_rank(g, weight, shift, x.dtype)
            gx = (a @ b).view_as(x)
        if ctx.needs_input_grad[1] and ctx.learns:
            gw = product(g.to(x.dtype).T, x.flatten(0, -2))
        return gx, gw, None, None


class _UpProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, base: Tensor, weight: Tensor, shift: Tensor | None, learns: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, shift)
        ctx.learns = learns
        base = _writable(ctx, base)
        moved = None if shift is None else shift.T
        base.view(-1, base.shape[-1]).addmm_(*_from_rank(x.flatten(0, -2), weight.T, moved, base.dtype))
        return base

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, shift = ctx.saved_tensors
        g, gx, gw = gradient.flatten(0, -2), None, None
        if ctx.needs_input_grad[0]:
            gx = _to_rank(g, weight, shift).to(x.dtype).view_as(x)
        if ctx.needs_input_grad[2] and ctx.learns:
            gw = product(g.T, x.flatten(0, -2).to(g.dtype))
        return gx, gradient, gw, None, None
