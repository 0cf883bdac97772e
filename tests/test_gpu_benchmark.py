"""benchmarks/gpu.py runs, here on a CPU, and what cannot run does not stop the rest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_tiny_on_a_cpu(tmp_path):
    names = ["flash 2, packed", "sdpa, shared prompts"]
    sizes = ["--pairs", "4", "--micro-batch", "2", "--prompt", "10", "20", "--response", "4", "8"]
    arguments = ["--output", tmp_path, "--device", "cpu", "--sizes", "tiny", "--steps", "2", *sizes]
    subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", *arguments, "--contestants", *names], check=True, cwd=tmp_path
    )
    report = json.loads((tmp_path / "gpu.json").read_text())
    refused, found = (report["sizes"]["tiny"]["contestants"][name] for name in names)
    assert "flash_attention_2 computes in half precision" in refused["error"]
    assert len(found["dpo_seconds"]) == 2 and len(found["pacmr_seconds"]) == 10
    assert found["as_asked"] and found["way"] == "a shared prompt with sdpa attention"
    # Forward and backward through the two layers' MLPs, and more for all the rest.
    mlps = 4 * found["tokens"] * 2 * 3 * 64 * 160
    assert mlps < found["needed"] < 5 * mlps
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4 and len({row.count("|") for row in rows}) == 1
    assert rows[3].startswith("| sdpa, shared prompts | ")


def test_without_a_gpu(tmp_path):
    """It says so at once; the machines that these tests run on have none, or are asked to hide it."""
    found = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", "--output", tmp_path],
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2 and "there is no GPU; --device cpu" in found.stderr
