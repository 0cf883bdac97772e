"""Modules that have moved, for the configs, checkpoints and model cards of older runs that name them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "pacmr_lightning.robust_objectives": "pacmr_lightning.objectives",
    "pacmr_lightning.vnet_folder": "pacmr_lightning.weighting.vnet",
}
"""Old name and new."""


class MovedModules(MetaPathFinder, Loader):
    """Finds a module under its old name, as the very module that it is today."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib``."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Puts today's module in its place."""
        sys.modules[module.__name__] = import_module(MOVED[module.__name__])


sys.meta_path.append(MovedModules())
