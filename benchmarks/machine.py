"""Description of the machine, and measurement of time and memory."""

from __future__ import annotations

import ctypes
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pacmr_lightning.policy.memory import return_freed_memory

MIB = 2**20
BLOCK = 2**16
MMAP_THRESHOLD = -3


def describe() -> str:
    """Return one line: processor, cores, threads, memory, GPU if any, versions."""
    import lightning
    import peft
    import torch
    import transformers

    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    model = re.search(r"model name\s*: (.+)", text)
    parts = [
        model[1] if model else "unknown processor",
        f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads",
        f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        f"load {os.getloadavg()[0]:.1f}",
    ]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    libraries = (torch, transformers, peft, lightning)
    parts.append(", ".join(f"{library.__name__} {library.__version__}" for library in libraries))
    return "; ".join(parts)


def spread(values: Sequence[float], unit: float = 1) -> str:
    """Return the median in ``unit``, and the range."""
    found = (statistics.median(values), min(values), max(values))
    return "{:.3g} ({:.3g}-{:.3g})".format(*(value / unit for value in found))


def median_time(run: Callable[[], object], device: str, repetitions: int = 5, warm_up: int = 1) -> float:
    """Return median seconds of a call, without the warm-up."""
    import torch

    found = []
    for _ in range(warm_up + repetitions):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[warm_up:])


def in_fresh_process(function: Callable, *arguments: Any) -> Any:
    """Return the function's result from a new process, since this one's memory would count there."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class PeakMemory:
    """Peak memory from its creation on, over that in use then, MiB.

    On the CPU it is resident memory, and from here on glibc returns freed blocks at once (slower).
    """

    def __init__(self, device: str):
        self.device = device
        if device == "cuda":
            import torch

            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, BLOCK)
            return_freed_memory()
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
        self._start = self._most()

    def over_start(self) -> float:
        """Return the peak over the start, MiB."""
        return self._most() - self._start

    def _most(self) -> float:
        if self.device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated() / MIB
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
