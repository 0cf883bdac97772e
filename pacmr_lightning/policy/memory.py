"""RAM that a process may take, and the return of freed memory to the system."""

import ctypes
import sys
from pathlib import Path

import psutil

CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""Control groups of version 2, by which Slurm and containers limit a process's memory."""


def free_memory() -> int:
    """Return the free bytes of RAM."""
    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _limits())])


def ram() -> int:
    """Return the bytes of RAM that this process may have when nothing else runs."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def _limits() -> list[tuple[int, int]]:
    """Limits of this process's control groups, and their bytes in use without droppable file caches."""
    limits: list[tuple[int, int]] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.partition("::")[2] for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):  # no Linux, or version 1
        return limits
    place = CONTROL_GROUPS / own.lstrip("/")
    for folder in (place, *place.parents):
        try:
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        limits.append((limit, used - int(counts.get("inactive_file", 0))))
    return limits


def return_freed_memory() -> None:
    """Return freed memory to the system, with glibc only.

    Blocks that training on a CPU leaves in glibc rarely fit other work, so memory can run out later.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
