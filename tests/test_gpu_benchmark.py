"""benchmarks/gpu.py runs, here on a CPU, and what cannot run does not stop the rest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_tiny_on_a_cpu(tmp_path):
    sizes = ["--pairs", "4", "--micro-batch", "2", "--prompt", "10", "20", "--response", "4", "8"]
    command = [sys.executable, BENCHMARKS / "gpu.py", "--output", tmp_path, "--device", "cpu", *sizes]
    command += ["--sizes", "tiny", "--coverage", "0", "1", "--contestants"]
    names = ["flash 2, packed", "sdpa, shared prompts"]
    rows = [f"{name}; 2 pairs at once" for name in names]

    def measured(*names):
        subprocess.run([*command, *names, "--steps", "2"], check=True, cwd=tmp_path)
        return json.loads((tmp_path / "gpu.json").read_text())["sizes"]["tiny"]

    first = measured(names[1])
    assert list(first) == rows[1:]
    both = measured(*names)
    assert both[rows[1]] == first[rows[1]]  # not measured again
    assert "flash_attention_2 computes in half precision" in both[rows[0]]["error"]
    found = both[rows[1]]
    assert len(found["dpo_seconds"]) == 2
    assert {name: len(pacmr["seconds"]) for name, pacmr in found["pacmr"].items()} == {"0%": 10, "100%": 10}
    assert found["as_asked"] and found["way"] == "a shared prompt with sdpa attention"
    # Forward and backward through the two layers' MLPs, and more for all the rest.
    mlps = 4 * found["tokens"] * 2 * 3 * 64 * 160
    assert mlps < found["needed"] < 5 * mlps
    lines = [line for line in (tmp_path / "gpu.md").read_text().splitlines() if line.startswith("|")]
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    other = subprocess.run([*command, *names], cwd=tmp_path, capture_output=True, text=True)
    assert other.returncode == 2 and "name another --output" in other.stderr


def test_what_is_asked_on_a_cpu(tmp_path):
    """A gradient in another layout is held to the plain one; what is done is not asked again."""
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--output", tmp_path, "--device", "cpu"]
    command += ["--only", "update: sdpa, s", "generation", "run: fit"]

    def said():
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        return found.stdout.splitlines(), json.loads((tmp_path / "check.json").read_text())

    lines, rows = said()
    assert len(rows) == 6 and len(lines) == 6 and all(line.startswith("right") for line in lines)
    shared, plain = (rows[f"update: sdpa, {way}, bfloat16"]["errors"] for way in ("shared", "separate"))
    assert 0 < shared["u"] <= 2 * plain["u"] and plain["DPO's gradient"] > 1e-4
    assert (tmp_path / "runs/fit/summary.json").exists()
    assert said() == (lines, rows)


def test_what_is_wrong(tmp_path):
    """A check that is killed and one that fails have a row, too, and the status is 1."""
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--output", tmp_path, "--device", "cpu"]
    found = subprocess.run(
        [*command, "--seconds", "2", "--only", "generation"], capture_output=True, text=True
    )
    assert found.returncode == 1 and found.stdout.startswith("WRONG  generation: not done after 2 s")
    found = subprocess.run([*command, "--only", "run: audit"], capture_output=True, text=True)
    assert found.returncode == 1 and "WRONG  run: audit: " in found.stdout and "status 2" in found.stdout


def test_without_a_gpu(tmp_path):
    """It says so at once; the machines that these tests run on have none, or are asked to hide it."""
    found = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", "--output", tmp_path],
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2 and "there is no GPU; --device cpu" in found.stderr
