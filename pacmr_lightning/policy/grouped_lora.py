"""LoRA layers together: products of those of one input (q, k, v; gate, up), and the casts of all weights."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..strategies.sharding import is_sharded
from .lora_layer import ADAPTER, PolicyLora, SharedInput


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
        self.nodes: list[Sequence[Any]] = []
        self.weights: list[Tensor] = []
        self.shapes: list[tuple[int, int]] = []
        for first in layers:
            node: Sequence[Any] = first.shared.layers if first.shared else [first]
            if first in others or any(layer.scaling[ADAPTER] != self.scaling for layer in node):
                continue
            a, b = ([getattr(x, part)[ADAPTER].weight for x in node] for part in ("lora_A", "lora_B"))
            self.nodes.append(node)
            self.weights += [*a, *b]
            self.shapes += [(sum(map(len, a)), a[0].shape[1]), *(tuple(weight.shape) for weight in b)]

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
        found = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        for part in found if self.compiled else ():
            torch._dynamo.mark_static(part)
        return iter(found)
