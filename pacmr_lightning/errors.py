"""The one exception that means: the input is wrong and the user can mend it."""

import re


class UserError(Exception):
    """Bad input. The message is one sentence that names the offending value and the fix.

    No ValueError: jsonargparse would take those for a type mismatch and bury the message.

    The command line prints the message alone, without a traceback, and exits with status 2.
    """


def check_at_least(least: float, **options: float | None) -> None:
    """Raise a UserError for the first option that is below ``least``; None is allowed."""
    for name, value in options.items():
        if value is not None and value < least:
            raise UserError(f"{name} is {value}, but it must be at least {least}.")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device, or the machine, has too little memory."""
    of_torch = isinstance(error, RuntimeError) and re.search(r"DefaultCPUAllocator|out of memory", str(error))
    return isinstance(error, MemoryError) or bool(of_torch)  # torch.OutOfMemoryError is a RuntimeError
