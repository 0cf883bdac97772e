"""Return of freed memory to the system."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Return freed memory to the system, with glibc only.

    Blocks that training on a CPU leaves in glibc rarely fit other work, so memory can run out later.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
