"""Free RAM, by a fake control group."""

from pathlib import Path

import psutil

from pacmr_lightning.policy import memory as module
from pacmr_lightning.policy.memory import free_memory, ram


def test_of_ram(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "CONTROL_GROUPS", tmp_path)
    assert 0 < free_memory() <= ram() == psutil.virtual_memory().total


def test_of_a_control_group(monkeypatch, tmp_path):
    """Its file caches can be dropped; a group without a limit says max."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next(line[3:] for line in lines if line.startswith("0::")) if lines else ""
    outer, inner = tmp_path, tmp_path / own.lstrip("/") / "job"
    inner.mkdir(parents=True)
    monkeypatch.setattr(module, "CONTROL_GROUPS", tmp_path)
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
