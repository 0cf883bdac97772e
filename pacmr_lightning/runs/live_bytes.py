"""The peak memory of torch operations, measured on real or on fake tensors."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, counts the bytes of all storages that operations make, until each is freed.

    Attributes:
        now: bytes alive.
        peak: the most there have been.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.now = self.peak = 0
        kept = [*module.parameters(), *module.buffers()]
        self._known: dict[int, Any] = {t.untyped_storage()._cdata: t for t in kept}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and looks at what it returns."""
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
