"""benchmarks/gpu_first.py on a CPU: rows at once, deadlines, and the tables of a page."""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from statistics import median

import pytest

from .conftest import read_lines

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FIRST = [sys.executable, str(BENCHMARKS / "gpu_first.py")]


@pytest.fixture
def gpu_first(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("gpu_first")


def test_the_tables(gpu_first, tmp_path):
    """By hand: TRL's time over ours, the last turn's memory, and what went wrong."""
    about = {"machine": "a card; load 1.5; more", "seconds": 9.0}
    speed = {"tokens": 1000, "needed": 3e12}
    for stage, row, values in (
        ("probes", "matrix product", {"flops": 1e13, "says": "10 TFLOP/s"}),
        ("1.5B", "ours, recomputed, turn 1", {"updates": [0.5, 0.7], "peak": 20.0} | speed),
        ("1.5B", "ours, recomputed, turn 2", {"updates": [0.6], "peak": 21.0} | speed),
        ("1.5B", "TRL, recomputed, turn 1", {"updates": [1.2, 1.2]}),
        ("1.5B", "TRL, kept, turn 1", {"updates": [2.4]}),
        ("1.5B", "ours, recomputed; compiled, turn 1", {"updates": [0.4]} | speed),
        ("1.5B", "ghost", {"vnet": [4.0], "plain": [1.0], "peak": 9.87, "says": "1.30"}),
        ("correct", "update", {"right": False, "says": "u off by | 1"}),
        ("correct", "run: fit", {"error": "OutOfMemoryError: no"}),
    ):
        gpu_first.add(tmp_path / "rows.jsonl", {"stage": stage, "row": row, **about, **values})
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_first.BEGIN}\nold\n{gpu_first.END}\nafter\n")
    for _ in range(2):
        gpu_first.write_page(page, [tmp_path / "rows.jsonl"])
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
        assert text.count("a card; more") == 3  # of each stage
        for line in (
            "| ours, recomputed | 0.6 (0.5-0.7) | 2.00 | 1,667 | 50% | 21.0 |",
            "| ours, recomputed; compiled | 0.4 (0.4-0.4) | 3.00 | 2,500 | 75% |  |",
            "| ghost | right | 1.30 | 9.0 | 9.9 |",
            "| update | WRONG | u off by / 1 | 9.0 |  |",
            "| run: fit | not measured | OutOfMemoryError: no | 9.0 |  |",
        ):
            assert line in text
    page.write_text("no marks")
    with pytest.raises(SystemExit):
        gpu_first.write_page(page, [tmp_path / "rows.jsonl"])
    assert page.read_text() == "no marks"


@pytest.mark.slow
def test_what_is_right_and_how_fast(tmp_path, monkeypatch):
    """Gradients in another layout, whole runs, a resume and DeepSpeed; each change before and after."""
    monkeypatch.delenv("MASTER_PORT", raising=False)  # Lightning's of another test; the runs would share it
    words = ["correct", "runs", "1.5B", "--output", str(tmp_path), "--seconds", "900"]
    found = subprocess.run([*FIRST, "--device", "cpu", *words], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    every = {row["row"]: row for row in read_lines(tmp_path / "rows.jsonl")}
    right = [row for row in every.values() if row["stage"] in ("correct", "runs")]
    assert len(right) == 21 and all(row.get("right", True) for row in right)
    shared, plain = (every[f"update: sdpa, {way}, bfloat16"]["errors"] for way in ("shared", "separate"))
    assert 0 < shared["u"] <= 2 * plain["u"] and plain["DPO's gradient"] > 1e-4
    way = "kept, 32 at once; auto, shared, LoRA in bf16"
    ghost, profile = every[f"PACMR-DPO, {way}, gradients kept"], every[f"profile of an update: {way}"]
    times = ghost["vnet"], ghost["plain"]
    assert [len(seconds) for seconds in times] == [2, 2]
    vnet, plain = map(median, times)
    assert ghost["says"].endswith(f"ten updates over DPO's {(9 * plain + vnet) / plain / 10:.2f}")
    assert profile["profile"]["CPU"] and profile["says"].startswith("CPU: ")
    turns = [name for name in every if name.startswith("ours, ")]
    assert len(turns) == (5 if shutil.which("g++") else 3)


def test_the_commands_of_the_page(gpu_first):
    """Each is bash, in the time that its stages take; the table has the stages and their deadlines."""
    section = (BENCHMARKS / "README.md").read_text().partition("## One GPU\n")[2]
    whole = 0
    for text, command in re.findall(r"(.*?)```bash\n(.*?)```", section, re.DOTALL):
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)
        for most, installs in re.findall(r"at most (\d+) seconds(?:, (\d+) of them to install)?\)", text):
            stages = re.search(r"gpu_first\.py (.+?) --device", command)[1].split()
            assert int(most) == int(installs or 0) + sum(gpu_first.STAGES[stage] for stage in stages)
            whole += int(most)
    assert 0 < whole < 12 * 60, "three of fifteen minutes are for the machine's start"
    said = re.findall(r"\| `(.+)` \| (\d+) \|", section)
    assert {name: int(seconds) for name, seconds in said} == gpu_first.STAGES


def test_the_page_has_the_kept_rows(gpu_first):
    research = BENCHMARKS.parent / "research"
    found = gpu_first.rows_of([research / "numbers/h100.jsonl"])
    page = gpu_first.page(found)
    assert page in (research / "notebook/one-gpu.md").read_text()
    parts = page.partition("#### 7B")[::2]
    small, large = (1 / max(map(float, re.findall(r"\| (\d\.\d\d) \| [\d,]+ \| \d+% \|", p))) for p in parts)
    readme = (research.parent / "README.md").read_text()
    assert f"takes {large:.2f} (7B) and {small:.2f} (1.5B) of TRL's time" in " ".join(readme.split())
