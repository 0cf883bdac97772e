"""Freed memory goes back to the machine."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOLES = """
import os
from pathlib import Path
import torch
from pacmr_lightning.policy.memory import return_freed_memory

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

torch.ones(2**22)  # from the first free of a large block on, glibc keeps such blocks
start = held()
blocks = [torch.ones(2**18) for _ in range(300)]  # 1 MiB each
last = blocks[-1]  # above all the others, so that what is below it stays
del blocks
before = held()
return_freed_memory()
print(before - start, held() - start, last.sum().item())
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="the C library is not glibc",
)
def test_holes_are_given_back():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    asked = [sys.executable, "-c", HOLES]
    found = subprocess.run(asked, env=environment, cwd=Path.cwd(), capture_output=True, text=True, check=True)
    before, after, total = map(float, found.stdout.split())
    assert before > 250 and after < 50 and total == 2**18
