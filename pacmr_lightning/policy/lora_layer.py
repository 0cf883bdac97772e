"""The policy's LoRA layer: PEFT's, with a forward pass of its own that the method works through.

What a step needs of a layer are fields of it, which ``layers_with`` sets for a while: no adapter for the
reference (PEFT's ``_disable_adapters``, read as ``enabled``), other weights for the virtual step and the
central difference (``shift``), gradients of single pairs (``per_pair``), products in half precision
(``compute_dtype``). One autograd node does all of them, for all layers of one input (q, k, v; gate, up;
``share_inputs``), and no parameter is written.

PEFT casts each layer's input to the adapter's fp32, and adds an fp32 output to the base's. On a GPU this
memory traffic may take longer than the base's own product. With a ``compute_dtype``, A and B are cast down
instead, as under autocast; unlike there, B's product is added into the base's output before that is rounded,
and the weights' gradients are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from ..errors import UserError
from ..strategies.sharding import is_sharded
from .token_layout import Rows

ADAPTER = "default"
BF16 = torch.bfloat16
LoraDtype = Literal["float32", "base"]


class UnsupportedLoraError(UserError):
    """A LoRA layer of a kind, or in a place, of which single pairs' gradients are not computed."""


class PolicyLora(nn.Module):
    """PEFT's LoRA layer over any linear base; its options, parameters and files stay PEFT's.

    y = base(x) + s (B + dB)(A + dA) x, for (..., in) x, (r, in) A, (out, r) B and the scaling s:

    >>> from peft import LoraConfig
    >>> layer = LoraLinear(nn.Linear(2, 1), ADAPTER, r=1, lora_alpha=2, config=LoraConfig())
    >>> for p, values in zip(layer.parameters(), ([[1.0, 1.0]], [0.0], [[1.0, 2.0]], [[3.0]])):
    ...     p.data = torch.tensor(values)  # W, its bias, A, B; s is 2
    >>> x = torch.tensor([[1.0, 1.0]])
    >>> layer(x).item()  # 2 + 2 * 3 * 3
    20.0
    >>> layer.shift = torch.tensor([[0.0, 1.0]]), torch.tensor([[-1.0]])
    >>> layer(x).item()  # 2 + 2 * 2 * 4
    18.0
    >>> with layers_with("_disable_adapters", {layer: True}):  # the reference
    ...     layer(x).item()
    2.0
    """

    scaling: dict[str, float]  # PEFT's
    lora_A: Any
    lora_B: Any
    shift: tuple[Tensor, Tensor] | None = None
    """(dA, dB), which are added to A and B."""
    per_pair: PerPair | None = None
    """If set, backward gives single pairs' gradients, and none of A and B."""
    compute_dtype: torch.dtype | None = None
    """The dtype of the products where the input has it; else they are in that of the weights."""
    in_place = True
    """False where the base's output is kept for backward, and may not be written."""
    others: Sequence[PolicyLora] = ()
    """Layers that are given this one's input after it, and are computed with it."""
    waiting: tuple[Tensor | None, Any] = None, None
    """An input, and the output that another layer has just computed for it, with the same fields."""
    casts: Sequence[Tensor] | None = None
    """In ``compute_dtype`` A of this layer and ``others``, (R, in), and each one's B."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **options: Any) -> None:
        super().__init__(base_layer, adapter_name, **options)
        # PEFT's own dispatch tells its layer so; merging transposes by it.
        self.fan_in_fan_out = self.is_target_conv_1d_layer = isinstance(base_layer, Conv1D)

    @property
    def enabled(self) -> bool:
        """False for the reference: the base alone."""
        return not self._disable_adapters

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the adapter on or off; PEFT's also changes which parameters are trained."""
        self._disable_adapters = not enabled

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return (k, in) and (out, k), whose product is (B + dB)(A + dA)."""
        a, b = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        if self.shift is None:
            return a, b
        da, db = self.shift
        if self.compute_dtype is None:
            return a + da, b + db
        # In half precision most of a shift would vanish in the sums.
        return torch.cat([a, da, a, da]), torch.cat([b, b, db, db], 1)

    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return (..., out) in the base's dtype."""
        if args or options or self.merged_adapters or self._active_adapter not in (ADAPTER, [ADAPTER]):
            return super().forward(x, *args, **options)
        if not self.enabled:
            return self.base_layer(x)
        if self.per_pair is not None:
            self.per_pair.check(x)
        (known, y), self.waiting = self.waiting, (None, None)
        if x is known:
            return y
        layers = [self, *(other for other in self.others if other.scaling == self.scaling)]
        half = self.compute_dtype == x.dtype
        dtype = x.dtype if half else self.lora_A[ADAPTER].weight.dtype
        casts = self.casts if half and len(layers) > len(self.others) else None
        per_pair = [each.per_pair for each in layers]
        tensors: list[Tensor] = []
        for each in layers:
            leaves = each.per_pair.leaves if each.per_pair is not None else ()
            tensors += [each.base_layer(x), *each.factors(), *leaves]
        more = self.scaling[ADAPTER], dtype, self.in_place, per_pair, casts
        outputs = _LoraProducts.apply(x, *more, *tensors)
        for each, y in zip(layers[1:], outputs[1:], strict=True):
            each.waiting = x, y
        return outputs[0]


@contextmanager
def layers_with(field: str, values: Mapping[Any, Any]) -> Iterator[None]:
    """Give a field other values inside, by layer."""
    before = [getattr(layer, field) for layer in values]
    try:
        for layer, value in values.items():
            setattr(layer, field, value)
        yield
    finally:
        for layer, value in zip(values, before, strict=True):
            setattr(layer, field, value)


def share_inputs(layers: Mapping[str, Any]) -> None:
    """Compute layers of a module together that it called one after the other with one input.

    ZeRO-3 gathers a layer's weights for its own call, so there each is computed alone.

    Args:
        layers: in the order of the calls, by name; all of them stay alone if one is PEFT's.
    """
    first, *others = layers.values()
    of_one_module = len({name.rpartition(".")[0] for name in layers}) == 1
    own = all(isinstance(layer, PolicyLora) for layer in layers.values())
    if of_one_module and own and not first.others and not is_sharded(next(first.parameters())):
        first.others = others


def weights_cast(layers: Sequence[Any]) -> dict[PolicyLora, Sequence[Tensor]]:
    """Return ``casts`` of all layers of a policy, made at once: each layer would start kernels of its own.

    They are for one pass, since DeepSpeed writes weights without a trace. As parameters they have fixed sizes
    for torch.compile, like the weights; else a number of tokens that equals one would be taken for it.
    """
    computed = {other for layer in layers for other in layer.others}
    nodes = [[layer, *layer.others] for layer in layers if layer not in computed]
    stacks: list[list[Tensor]] = []  # of each node A of all its layers, and each one's B
    for node in nodes:
        stacks += [[x.lora_A[ADAPTER].weight for x in node], *([x.lora_B[ADAPTER].weight] for x in node)]
    with torch.no_grad():
        flat = torch.cat([weight.view(-1) for stack in stacks for weight in stack])
    parts = flat.to(layers[0].compute_dtype).split([sum(map(Tensor.numel, stack)) for stack in stacks])
    casts = (
        nn.Parameter(part.view(-1, stack[0].shape[1]), requires_grad=False)
        for part, stack in zip(parts, stacks, strict=True)
    )
    return {node[0]: [*islice(casts, 1 + len(node))] for node in nodes}


class LoraLinear(PolicyLora, lora.Linear):
    """On nn.Linear, and on GPT-2's Conv1D, whose weight is the other way round."""


class LoraLinear4bit(PolicyLora, getattr(lora, "Linear4bit", lora.Linear)):  # type: ignore[misc]
    """On a base of bitsandbytes in 4 bits, which PEFT merges in its own way."""


def lora_layer(base: nn.Module, adapter: str, **options: Any) -> nn.Module | None:
    """Return the layer for a linear base; None leaves it to PEFT, as for experts and weights in 8 bits."""
    if options.get("parameter_name") is not None:
        return None
    if not type(base).__module__.startswith("bitsandbytes"):
        return LoraLinear(base, adapter, **options)
    return LoraLinear4bit(base, adapter, **options) if type(base).__name__ == "Linear4bit" else None


LAYERS: dict[type[nn.Module], Any] = {nn.Linear: lora_layer, Conv1D: lora_layer}
"""For ``LoraConfig._register_custom_module``."""


@dataclass(eq=False)
class PerPair:
    """Leaves of the graph that stand for each pair's own A and B: their gradients are single pairs'.

    Args:
        rows: of N pairs, with R rows of T tokens.
        leaves: (N, r, in) and (N, out, r); with a direction (N,) e alone, for A + e_i dA and B + e_i dB.
        direction: (dA, dB).
    """

    rows: Rows
    leaves: Sequence[Tensor]
    direction: Sequence[Tensor] = ()

    def check(self, x: Tensor) -> None:
        """Raise UnsupportedLoraError unless a layer's (R, T, in) input has these rows."""
        if x.shape[:-1] != self.rows.token_pair.shape:
            raise UnsupportedLoraError(
                "GhostDotProduct and kept gradients need LoRA layers that see whole rows, but one sees some "
                "tokens only: leave lm_head and experts out of target_modules, or use CentralDifference with "
                "keep_gradients auto."
            )

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """(N, m, n) sums over each pair's tokens of l r^T, for (RT, m) and (RT, n) factors of all tokens.

        A linear's weight gradient is such a sum (arXiv 1510.01799), and LoRA's are small.
        """
        sums = product(self.rows.unpacked(left).transpose(1, 2), self.rows.unpacked(right))
        pairs = self.rows.pairs
        return sums if len(sums) == pairs else sums.unflatten(0, (-1, pairs)).sum(0)

    def gradients(self, a: Tensor, b: Tensor) -> Sequence[Tensor]:
        """Return those of ``leaves`` from (N, k, in) and (N, out, k) gradients of ``factors``."""
        rank = (self.direction or self.leaves)[0].shape[-2]
        if a.shape[1] > rank:  # shifted: [A dA A dA] and [B B dB dB]
            (a, _, again, _), (b, twice, _, _) = a.split(rank, 1), b.split(rank, 2)
            a, b = a + again, b + twice
        if not self.direction:
            return a, b
        da, db = self.direction
        return [a.flatten(1) @ da.flatten() + b.flatten(1) @ db.flatten()]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product (batched for 3 dimensions) in the operands' dtype; of bf16 ones in fp32, unrounded."""
    if a.dtype != BF16:
        return a @ b
    if a.is_cuda:
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _scaled(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """A product times a number, as one operation."""
    return torch.addmm(b[:1], a, b, beta=0, alpha=factor)  # beta 0 leaves b[:1] out


def _cat(tensors: list[Tensor] | tuple[Tensor, ...], dim: int) -> Tensor:
    """Concatenate; one tensor is not copied."""
    return torch.cat(tensors, dim) if len(tensors) > 1 else tensors[0]


class _LoraProducts(torch.autograd.Function):
    """One node for n layers of one input: calls of operations are most of a small model's time.

    ``tensors`` are each layer's base output, ``factors``, and ``leaves`` of its ``per_pair``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scaling: float,
        dtype: torch.dtype,
        in_place: bool,
        per_pair: Sequence[PerPair | None],
        casts: Sequence[Tensor] | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        bases, a, b = (tensors[i :: len(tensors) // len(per_pair)] for i in range(3))
        down, *up = casts or (_cat(a, 0).to(dtype), *(factor.to(dtype) for factor in b))
        h = _scaled(x.flatten(0, -2).to(dtype), down.T, scaling)
        ctx.save_for_backward(x, h, down, *up)
        ctx.ranks = [len(factor) for factor in a]
        ctx.scaling, ctx.per_pair = scaling, per_pair
        outputs = []
        for base, factor, part in zip(bases, up, h.split_with_sizes(ctx.ranks, 1), strict=True):
            y = base
            copied = not in_place or base.dtype != dtype or torch.compiler.is_compiling()
            if copied or base._is_view() or not base.is_contiguous():  # autograd refuses some views
                y = base.to(dtype, copy=True, memory_format=torch.contiguous_format)
            y.view(-1, y.shape[-1]).addmm_(part, factor.T)
            outputs.append(y.to(base.dtype))
        if written := [y for y, base in zip(outputs, bases, strict=True) if y is base]:
            ctx.mark_dirty(*written)
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # saved factors have no graph
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, h, down, *up = ctx.saved_tensors
        rows, *g = (t.flatten(0, -2).to(h.dtype) for t in (x, *gradients))
        gh = _cat([_scaled(each, factor, ctx.scaling) for each, factor in zip(g, up, strict=True)], 1)
        gx = (gh @ down).to(x.dtype).view_as(x) if ctx.needs_input_grad[0] else None
        lead = ctx.per_pair[0]
        outer = lead.outer if lead is not None else lambda left, right: product(left.T, right)
        of_a = outer(gh, rows).split_with_sizes(ctx.ranks, -2)
        of_b = map(outer, g, h.split_with_sizes(ctx.ranks, 1))
        found: list[Tensor | None] = []
        for base, a, b, of in zip(gradients, of_a, of_b, ctx.per_pair, strict=True):
            found += [base, a, b] if of is None else [base, None, None, *of.gradients(a, b)]
        return gx, None, None, None, None, None, *found
