"""State of objectives and weightings in checkpoints."""

from copy import copy
from typing import Any


class Stateful:
    """Base class of objects with attributes that checkpoints hold, the same on all ranks."""

    kept: tuple[str, ...] = ()
    """Their names, of plain numbers, strings, lists and dicts, such as what "auto" became."""

    def state_dict(self) -> dict[str, Any]:
        """Return rank 0's state, always with the same keys; a subclass may add tensors."""
        return {name: copy(getattr(self, name)) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of ``state_dict``."""
        for name in self.kept:
            setattr(self, name, copy(state[name]))
