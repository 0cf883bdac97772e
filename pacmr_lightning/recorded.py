"""Objects that record their constructor's arguments, for the configuration of a run that Python started."""

import inspect
from copy import copy
from pathlib import Path
from typing import Any

from .files import expanded


class Recorded:
    """Base class of objects that ``as_config`` turns into ``class_path`` and ``init_args``."""

    made_with: dict[str, Any] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments; a copy takes them over."""
        made = super().__new__(cls)
        signature = inspect.signature(cls)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # a copy without arguments, or an error that the constructor raises itself
            if cls.__init__ is object.__init__:
                raise
            return made
        bound.apply_defaults()
        given = bound.arguments
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(name)
        object.__setattr__(made, "made_with", given)  # not that of nn.Module
        return made


class Stateful(Recorded):
    """Base class of recorded objects with attributes that checkpoints hold, the same on all ranks."""

    kept: tuple[str, ...] = ()
    """Their names, of plain numbers, strings, lists and dicts, such as what "auto" became."""

    def state_dict(self) -> dict[str, Any]:
        """Return rank 0's state, always with the same keys; a subclass may add tensors."""
        return {name: copy(getattr(self, name)) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of ``state_dict``."""
        for name in self.kept:
            setattr(self, name, copy(state[name]))


# For a class without a constructor of its own, which takes no arguments.
_ONE = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)
Recorded.__new__.__signature__ = inspect.Signature([_ONE])  # type: ignore[attr-defined]


def as_config(value: Any) -> Any:
    """Return plain values for YAML; raises TypeError for an object that is not ``Recorded``."""
    if isinstance(value, Recorded) and value.made_with is not None:
        options = {name: as_config(given) for name, given in value.made_with.items()}
        return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": options}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [as_config(each) for each in value]
    if isinstance(value, dict):
        return {str(name): as_config(each) for name, each in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return expanded(value)
    raise TypeError(f"{type(value).__qualname__} keeps no record of its arguments")
