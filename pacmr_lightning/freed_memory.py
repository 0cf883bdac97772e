"""Memory that was freed, and that the C library keeps for later."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Gives what was freed back to the machine, where the C library is glibc, and does nothing elsewhere.

    glibc keeps freed blocks of up to 32 MiB. After training on a CPU these are holes of the sizes that
    training needed; other work, such as sampling, finds little room in them and takes more, until a run that
    has trained for hours is killed for memory at its end.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
