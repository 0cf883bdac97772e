"""Free RAM, by a fake control group; and freed memory, which goes back to the machine."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pacmr_lightning.policy import memory as module
from pacmr_lightning.policy.memory import free_memory, ram


def test_of_a_control_group(monkeypatch, tmp_path):
    """Its file caches can be dropped; a group without a limit says max. Without a group all RAM counts."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next(line[3:] for line in lines if line.startswith("0::")) if lines else ""
    outer, inner = tmp_path, tmp_path / own.lstrip("/") / "job"
    inner.mkdir(parents=True)
    monkeypatch.setattr(module, "CONTROL_GROUPS", tmp_path)
    assert 0 < free_memory() <= ram() == psutil.virtual_memory().total
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path: f"0::{own.rstrip('/')}/job\n" if path == Path("/proc/self/cgroup") else read(path),
    )
    for folder, limit in ((inner, "max"), (outer, "1000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 400\ninactive_file 250\n")
    assert (free_memory(), ram()) == (550, 1000)
    (inner / "memory.max").write_text("600\n")
    assert (free_memory(), ram()) == (150, 600)


HOLES = """
import psutil, torch
from pacmr_lightning.policy.memory import return_freed_memory
held = lambda: psutil.Process().memory_info().rss / 2**20
torch.ones(2**22)  # from the first free of a large block on, glibc keeps such blocks
start = held()
blocks = [torch.ones(2**18) for _ in range(300)]  # 1 MiB each
last = blocks[-1]  # above all the others, so that what is below it stays
del blocks
before = held()
return_freed_memory()
print(before - start, held() - start, last.sum().item())
"""


@pytest.mark.slow
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
