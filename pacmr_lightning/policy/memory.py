"""Memory that a process and single pairs' gradients may take, and its return to the system."""

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_info

from ..strategies.ranks import min_over_ranks, ranks

FREE = 0.8
"""Single pairs' gradients' share of the memory that a GPU's largest step so far has left free."""
RAM_SHARE = 1 / 8
"""Single pairs' gradients' share of the RAM, without a GPU."""
SMALL = 2**26
"""Bytes that single pairs' gradients may always take."""
GIB = 2**30
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


@dataclass
class GradientMemory:
    """Memory that single pairs' gradients may take in VNet's updates."""

    has_stepped: bool = False
    """True after this process's first optimizer step, when a GPU's peak memory is representative."""
    limit: int | None = None
    """Bytes; None until they are first asked for."""

    def fits(self, needed: int, device: torch.device) -> bool:
        """Return whether to keep gradients of ``needed`` bytes, the same on all ranks.

        The limit stays the same, but there is none before a GPU's first step. A CPU's depends on its RAM, not
        on what is free, so that a run twice is the same bit for bit.
        """
        if needed <= SMALL:
            return True
        if device.type == "cuda" and not self.has_stepped:
            return False
        if self.limit is None:
            limit, of = int(RAM_SHARE * ram()) // ranks(), f"{RAM_SHARE:.1%} of the RAM by processes"
            if device.type == "cuda":
                # Bytes that neither others nor this process's largest step have taken.
                left = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
                limit = int(FREE * (left - torch.cuda.max_memory_allocated(device)))
                of = f"{FREE:.0%} of what the largest step so far leaves free"
            self.limit = min_over_ranks(limit, device)
            kept = needed <= self.limit
            rank_zero_info(
                f"keep_gradients auto is {str(kept).lower()}: the gradients of an update's pairs take "
                f"{needed / GIB:.3g} GiB, and they may take {self.limit / GIB:.3g} GiB ({of}); "
                f"overrule it by --model.weighting.keep_gradients {str(not kept).lower()}."
            )
        return needed <= self.limit
