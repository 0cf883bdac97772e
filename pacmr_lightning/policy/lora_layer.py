"""The policy's LoRA layer: PEFT's, with a forward pass of its own that the method works through.

What a step needs of a layer are fields of it: no adapter for the reference (``enabled``), other weights for
the virtual step and the central difference (``shift``), gradients of single pairs (``per_pair``), products in
half precision (``compute_dtype``). One autograd node does all of them, for all layers of one input (q, k, v;
gate, up; ``share_inputs``), and no parameter is written.

PEFT casts each layer's input to the adapter's fp32, and adds an fp32 output to the base's. On a GPU this
memory traffic may take longer than the base's own product. With a ``compute_dtype``, A and B are cast down
instead, as under autocast. Three things differ from autocast: B's product is added into the base's output
before that is rounded, the weights' gradients are not rounded, and a shift of the weights is a product of its
own, since most of it would vanish in the rounded sum of both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from operator import add
from typing import Any, Literal

import torch
from peft.tuners import lora
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import UserError
from ..strategies.sharding import is_sharded

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
    >>> layer.enabled = False  # the reference
    >>> layer(x).item()
    2.0
    """

    enabled = True
    """False for the reference: the base alone."""
    shift: tuple[Tensor, Tensor] | None = None
    """(dA, dB), which are added to A and B."""
    per_pair: PerPair | None = None
    """If set, backward hands single pairs' gradients of A and B to it, and none to autograd."""
    in_place = True
    """False where the base's output is kept for backward, and may not be written."""
    compute_dtype: torch.dtype | None = None
    """The dtype of the products where the input has it; else they are in that of the weights."""
    calls: list[tuple[weakref.ref[Tensor], list[PolicyLora]]] | None = None
    """If set, a call is added: inputs in turn, each with the layers that were given it one by one."""
    shared: SharedInput | None = None
    """The layers that have this one's input after it."""
    copies: Sequence[Sequence[Tensor]] | None = None
    """In ``compute_dtype`` (R, in) A of all layers of ``shared``, and each B; the same times s."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **options: Any) -> None:
        super().__init__(base_layer, adapter_name, **options)
        # PEFT's own dispatch tells its layer so; merging transposes by it.
        self.fan_in_fan_out = self.is_target_conv_1d_layer = isinstance(base_layer, Conv1D)
        self.waiting: tuple[Tensor, Tensor] | None = None
        """An input, and the output that another layer has computed for it."""

    @property
    def casts(self) -> bool:
        """True if a pass needs A and B in half precision, and them alone."""
        return self.enabled and self.shift is None and self.compute_dtype is not None

    def enable_adapters(self, enabled: bool) -> None:
        """Set ``enabled``; PEFT's also walks through the parameters."""
        self.enabled = enabled

    @property
    def disable_adapters(self) -> bool:
        """As PEFT's."""
        return not self.enabled

    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return (..., out) in the base's dtype."""
        if self.calls is not None:
            if not self.calls or self.calls[-1][0]() is not x:
                self.calls.append((weakref.ref(x), []))
            self.calls[-1][1].append(self)
        if args or options or self.merged_adapters or self._active_adapter not in (ADAPTER, [ADAPTER]):
            return super().forward(x, *args, **options)
        if not self.enabled:
            return self.base_layer(x)
        if self.per_pair is not None:
            self.per_pair.tokens.check(x)
        if self.waiting is not None:
            (known, y), self.waiting = self.waiting, None
            if x is known:
                return y
        layers = [self] if self.shared is None else self.shared.together()
        tensors = [
            (layer.base_layer(x), layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
            + (layer.shift or (None, None))
            for layer in layers
        ]
        dtype = tensors[0][1].dtype if self.compute_dtype != x.dtype else self.compute_dtype
        per_pair = [layer.per_pair for layer in layers]
        copies = self.copies if dtype == self.compute_dtype and self.shift is None else None
        if copies is not None and len(copies[0]) != 1 + len(layers):  # of other layers than are computed now
            copies = None
        more = self.scaling[ADAPTER], dtype, self.in_place, per_pair, copies
        first, *others = _LoraProducts.apply(x, *more, *chain.from_iterable(tensors))
        for layer, y in zip(layers[1:], others, strict=True):
            layer.waiting = x, y
        return first


class SharedInput:
    """Layers of one module that are given the same tensor, such as q, k and v: the first computes for all.

    It does so during a call of the module, within which neither weights nor fields change.
    """

    def __init__(self, module: nn.Module, layers: Sequence[PolicyLora]) -> None:
        self.layers, self.forward, self.during_call = layers, module.forward, False
        layers[0].shared = self
        module.forward = self.call  # with a hook each module would be compiled anew

    def call(self, *args: Any, **options: Any) -> Any:
        """Call the module."""
        self.during_call = True
        try:
            return self.forward(*args, **options)
        finally:
            self.during_call = False
            for layer in self.layers:
                layer.waiting = None

    def together(self) -> list[PolicyLora]:
        """Return the layers to compute now: the first, and others with its scaling and fields."""

        def way(layer: Any) -> tuple[Any, ...]:
            return layer.scaling[ADAPTER], layer.shift is None, layer.per_pair and layer.per_pair.tokens

        first, *others = self.layers
        return [first, *(x for x in others if self.during_call and way(x) == way(first))]


def share_inputs(model: nn.Module, groups: Iterable[tuple[str, ...]]) -> None:
    """Compute layers of a module together that a pass called one after the other with one input.

    ZeRO-3 gathers a layer's weights for its own call, so there each is computed alone.

    Args:
        model: has the layers.
        groups: names of such layers, in the order of the calls.
    """
    for names in sorted(groups, key=len, reverse=True):  # recomputation may have stopped inside one
        layers: list[Any] = [model.get_submodule(name) for name in names]
        modules = {name.rpartition(".")[0] for name in names}
        if (
            len(layers) > 1 == len(modules)
            and all(isinstance(layer, PolicyLora) for layer in layers)
            and layers[0].shared is None
            and not is_sharded(layers[0].lora_A[ADAPTER].weight)
        ):
            SharedInput(model.get_submodule(*modules), layers)


class WeightCasts:
    """A and B of all layers in half precision, cast at once; each layer would start kernels of its own.

    Args:
        layers: of the policy; nodes with another scaling than the first one's cast their own.
        compiled: tell torch.compile that the copies have fixed sizes, as weights have. Else a number of
            tokens that equals one would be taken for it.
    """

    def __init__(self, layers: Sequence[PolicyLora], compiled: bool) -> None:
        self.compiled = compiled
        lead: Any = layers[0]
        self.scaling, self.dtype = lead.scaling[ADAPTER], lead.compute_dtype
        others = {other for layer in layers if layer.shared for other in layer.shared.layers[1:]}
        nodes: list[Sequence[Any]] = [x.shared.layers if x.shared else [x] for x in layers if x not in others]
        self.nodes = [node for node in nodes if all(x.scaling[ADAPTER] == self.scaling for x in node)]
        stacks: list[list[Tensor]] = []  # each node's A, of one width, and its layers' B
        for node in self.nodes:
            stacks += [[x.lora_A[ADAPTER].weight for x in node], *([x.lora_B[ADAPTER].weight] for x in node)]
        self.weights = [weight for stack in stacks for weight in stack]
        self.shapes = [(sum(map(len, stack)), stack[0].shape[1]) for stack in stacks]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Give nodes ``copies`` for one pass, since DeepSpeed writes weights without a trace."""
        with torch.no_grad():
            flat = torch.cat([weight.view(-1) for weight in self.weights])
            plain, scaled = self._views(flat), self._views(flat * self.scaling)
        try:
            for node in self.nodes:
                node[0].copies = [list(islice(each, 1 + len(node))) for each in (plain, scaled)]
            yield
        finally:
            for node in self.nodes:
                node[0].copies = None

    def _views(self, values: Tensor) -> Iterator[Tensor]:
        parts = values.to(self.dtype).split([m * n for m, n in self.shapes])
        views = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        for part in views if self.compiled else ():
            torch._dynamo.mark_static(part)
        return iter(views)


class LoraLinear(PolicyLora, lora.Linear):
    """On nn.Linear, and on GPT-2's Conv1D, whose weight is the other way round."""


def lora_layer(base: nn.Module, adapter: str, **options: Any) -> nn.Module | None:
    """Return the layer for a linear base; None leaves it to PEFT, as for weights in 8 bits."""
    if options.get("parameter_name") is not None:
        return None
    if not type(base).__module__.startswith("bitsandbytes"):
        return LoraLinear(base, adapter, **options)
    return LoraLinear4bit(base, adapter, **options) if type(base).__name__ == "Linear4bit" else None


LAYERS: dict[type[nn.Module], Any] = {nn.Linear: lora_layer, Conv1D: lora_layer}
"""For ``LoraConfig._register_custom_module``."""

if hasattr(lora, "Linear4bit"):  # bitsandbytes is installed

    class LoraLinear4bit(PolicyLora, lora.Linear4bit):  # type: ignore[misc]
        """On a base in 4 bits, which PEFT merges in its own way."""


@dataclass(eq=False)
class TokensOfPairs:
    """Which pair each token of the rows belongs to.

    Args:
        owner: (R, T) pair numbers. Rows are pairs, or responses (chosen before rejected), or all in one.
        pairs: number N of pairs.
    """

    owner: Tensor
    pairs: int

    def check(self, x: Tensor) -> None:
        """Raise UnsupportedLoraError unless a layer's (R, T, in) input has these rows."""
        if x.shape[:-1] != self.owner.shape:
            raise UnsupportedLoraError(
                "GhostDotProduct needs LoRA layers that see whole rows, but this model mixes the tokens "
                "of several rows (mixture of experts?); use CentralDifference."
            )

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """(N, m, n) sums over each pair's tokens of l r^T, for (RT, m) and (RT, n) factors of all tokens.

        A linear's weight gradient is such a sum (arXiv 1510.01799), and LoRA's are small.
        """
        left, right = (x.unflatten(0, self.owner.shape) for x in (left, right))
        if len(self.owner) % self.pairs:
            left, right = self._by_pair(left), self._by_pair(right)
        rows = product(left.transpose(1, 2), right)
        return rows if len(rows) == self.pairs else rows.unflatten(0, (-1, self.pairs)).sum(0)

    def _by_pair(self, tokens: Tensor) -> Tensor:
        """One row's (1, T, n) as zero-padded (N, longest, n)."""
        order, rows, column, longest = self._places
        padded = tokens.new_zeros(self.pairs, longest, tokens.shape[2])
        padded[rows, column] = tokens[0, order]
        return padded

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """A row's tokens by pair, each one's pair and its number in it, and the largest number of tokens."""
        rows, order = self.owner[0].sort(stable=True)
        counts = rows.bincount(minlength=self.pairs)
        column = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        return order, rows, column, int(counts.max())


@dataclass(eq=False)
class PerPair:
    """Single pairs' gradients of a layer's A and B, which its backward adds at each use of the layer.

    Args:
        tokens: the rows' pairs.
        direction: (dA, dB); if given, only each gradient's product with it is kept.
    """

    tokens: TokensOfPairs
    direction: Sequence[Tensor] | None = None
    found: Sequence[Tensor] = ()
    """(N, r, in) and (N, out, r), or (N,) twice; empty before the first use."""

    def add(self, *gradients: Tensor) -> None:
        """Add the gradients of one use."""
        if self.direction is not None:
            both = zip(gradients, self.direction, strict=True)
            gradients = tuple(g.flatten(1) @ d.flatten() for g, d in both)
        self.found = [a + b for a, b in zip(self.found, gradients, strict=True)] if self.found else gradients


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product (batched for 3 dimensions) in the operands' dtype; of bf16 ones in fp32, unrounded."""
    if a.dtype != BF16:
        return a @ b
    # torch does not differentiate it.
    if a.is_cuda and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _factors(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    da: Sequence[Any],
    db: Sequence[Any],
    scaling: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """(k, in) down, of all layers, and each one's (out, k_i) up; products of both are s (B + dB)(A + dA).

    In ``dtype``; k is the sum R of all ranks and k_i one's rank, or both are twice that.
    """
    if da[0] is not None:
        if dtype == a[0].dtype:
            a, b = [*map(add, a, da)], [*map(add, b, db)]
        else:
            a, b = [*a, *da], [torch.cat(both, 1) for both in zip(b, db, strict=True)]
    return [(_cat(a) * scaling).to(dtype), *(each.to(dtype) for each in b)]


def _cat(tensors: Iterable[Tensor], dim: int = 0) -> Tensor:
    """Concatenate; one tensor is not copied."""
    first, *others = tensors
    return torch.cat([first, *others], dim) if others else first


def _to_rank(rows: Tensor, factor: Tensor, rank: int) -> Tensor:
    """(T, r) rows F, for an F (n, r), or for [F dF] rows (F + dF), whose sum alone is rounded."""
    if factor.shape[1] == rank:
        return rows @ factor
    both = product(rows, factor)
    return (both[:, :rank] + both[:, rank:]).to(rows.dtype)


def _for(factor: Tensor, h: Tensor) -> Tensor:
    """(T, k) h, twice beside itself for a factor with a shift, (k, n)."""
    return h if len(factor) == h.shape[1] else torch.cat([h, h], 1)


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


class _LoraProducts(torch.autograd.Function):
    """One node for n layers of one input: calls of operations are most of a small model's time.

    ``tensors`` are each layer's base output, A, B, dA and dB.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scaling: float,
        dtype: torch.dtype,
        in_place: bool,
        per_pair: Sequence[PerPair | None],
        copies: Sequence[Sequence[Tensor]] | None,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        bases, a, b, da, db = (tensors[i::5] for i in range(5))
        if copies is None:
            down, *up = back = _factors(a, b, da, db, scaling, dtype)
            ctx.left = scaling
        else:  # forward takes s A and B, backward A and s B: each gradient of A has its s then
            (a_cast, *up), (down, *scaled_b) = copies
            back, ctx.left = [a_cast, *scaled_b], 1.0
        ranks = [len(each) for each in a]
        h = _to_rank(x.flatten(0, -2).to(dtype), down.T, sum(ranks))
        ctx.save_for_backward(x, h, *back, *a, *b, *da, *db)
        ctx.scaling, ctx.dtype, ctx.per_pair = scaling, dtype, per_pair
        outputs, written = [], []
        for base, each, part in zip(bases, up, h.split_with_sizes(ranks, 1), strict=True):
            if base.dtype != dtype:
                y = torch.addmm(base.flatten(0, -2).to(dtype), _for(each.T, part), each.T)
                outputs.append(y.to(base.dtype).view(base.shape))
                continue
            # Out of place addmm would copy it. Autograd refuses some views.
            if not in_place or torch.compiler.is_compiling() or base._is_view() or not base.is_contiguous():
                base = base.clone(memory_format=torch.contiguous_format)
            else:
                written.append(base)
            base.view(-1, base.shape[-1]).addmm_(_for(each.T, part), each.T)
            outputs.append(base)
        if written:
            ctx.mark_dirty(*written)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        n = len(gradients)
        x, h, down, *saved = ctx.saved_tensors
        up, a, b, da, db = (saved[i : i + n] for i in range(0, 5 * n, n))
        ranks = [len(each) for each in a]
        rows, *g = (t.flatten(0, -2).to(ctx.dtype) for t in (x, *gradients))
        left = ctx.left  # factor that A's gradient lacks
        if torch.is_grad_enabled():  # this gradient is differentiated too
            down, *up = _factors(a, b, da, db, ctx.scaling, ctx.dtype)
            left = ctx.scaling
            h = _to_rank(rows, down.T, sum(ranks))
        ga: Sequence[Tensor | None]
        gb: Sequence[Tensor | None]
        gx, parts = None, h.split_with_sizes(ranks, 1)
        gh = _cat(map(_to_rank, g, up, ranks), 1)
        if ctx.needs_input_grad[0]:
            gx = (_for(down, gh) @ down).to(x.dtype).view_as(x)
        if ctx.per_pair[0] is not None:
            outer = ctx.per_pair[0].tokens.outer
            ga = _times(outer(gh, rows), left).split_with_sizes(ranks, 1)
            for taken, *both in zip(ctx.per_pair, ga, map(outer, g, parts), strict=True):
                taken.add(*both)
            ga = gb = [None] * n
        else:
            ga = _times(product(gh.T, rows), left).split_with_sizes(ranks)
            gb = [product(each.T, part) for each, part in zip(g, parts, strict=True)]
        each = zip(gradients, ga, gb, [None] * n, [None] * n, strict=True)
        return gx, None, None, None, None, None, *chain.from_iterable(each)
