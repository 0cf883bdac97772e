"""The exception for input that the user can fix."""

import re
from collections import deque
from collections.abc import Iterator
from operator import ge, gt, le, lt
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")
FAILED: deque[Exception] = deque(maxlen=8)
"""The last errors of ``construct``."""

_BOUNDS = {"[": ("at least", ge), "(": ("above", gt), "]": ("at most", le), ")": ("below", lt)}


class UserError(Exception):
    """Bad input; the message is one sentence that names the value and the fix.

    No ValueError, which jsonargparse would take for a type mismatch. Exit status 2, without a traceback.
    """


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its cause, the cause of that, and so on, each once: they may form a circle."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def user_error(error: BaseException | None) -> UserError | None:
    """Return the ``UserError`` among an exception and its causes."""
    return next((one for one in causes(error) if isinstance(one, UserError)), None)


def construct(class_type: type[T], *args: Any, **kwargs: Any) -> T:
    """Make an object for jsonargparse; refuse null, which that lets pass, and keep errors for unions."""
    try:
        nulls = [name for name, value in kwargs.items() if value is None]
        own = bool(nulls) and class_type.__module__.startswith(__package__)
        hints = get_type_hints(class_type.__init__) if own else {}
        for name in nulls:
            kind = hints.get(name, Any)
            if kind is not Any and not any(one in (None, NoneType) for one in get_args(kind)):
                raise UserError(f"{name} is null, but it must have a value.")
        return class_type(*args, **kwargs)
    except Exception as error:
        FAILED.append(error)
        raise


def check_at_least(least: float, **options: float | None) -> None:
    """Raise a UserError for the first option below ``least``; None is allowed."""
    check_within(f"[{least}, inf]", **options)


def check_within(interval: str, hint: str = "", /, **options: float | None) -> None:
    """Raise a UserError for the first option outside of an interval, as in ``(0, 1]``; None is allowed.

    ``hint`` ends the message: a usual value, or how to do without.
    """
    low, high = interval[1:-1].split(", ")
    (least, over), (most, under) = _BOUNDS[interval[0]], _BOUNDS[interval[-1]]
    words = f"{least} {low}" + (f" and {most} {high}" if high != "inf" else "")
    for name, value in options.items():
        if value is not None and not (over(value, float(low)) and under(value, float(high))):
            raise UserError(f"{name} is {value}, but it must be {words}{hint}.")


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's text, or its type's name, without the period."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def check_choice(kind: Any, **options: object) -> None:
    """Raise a UserError for the first option that is no value of a ``Literal`` type."""
    for name, value in options.items():
        if value not in get_args(kind):
            *others, last = map(str, get_args(kind))
            raise UserError(f"{name} is {value}, but it must be {', '.join(others)} or {last}.")


def check_is(kinds: Any, wanted: str, /, **objects: object) -> None:
    """Raise a UserError for the first object of other classes than ``kinds``; ``wanted`` names these."""
    for name, value in objects.items():
        if not isinstance(value, kinds):
            given = repr(value) if isinstance(value, (str, type, NoneType)) else f"a {type(value).__name__}"
            raise UserError(f"{name} is {given}, but it must be {wanted}.")


def check_rates(**rates: float) -> None:
    """Raise a UserError unless options are flip probabilities in [0, 1)."""
    check_within("[0, 1)", "; use 0.2 for 20%", **rates)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device, or the machine, has too little memory."""
    # torch.OutOfMemoryError is a RuntimeError. cuBLAS and cuDNN have words of their own for it.
    words = r"DefaultCPUAllocator|out of memory|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED"
    of_torch = isinstance(error, RuntimeError) and re.search(words, str(error))
    return isinstance(error, MemoryError) or bool(of_torch)
