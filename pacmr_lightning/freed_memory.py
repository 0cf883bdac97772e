"""Return of freed memory to the system."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Return freed memory to the system, with glibc only.

    Blocks that training on a CPU leaves in glibc fit no other work, and long runs were killed for memory.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
