"""Real sweeps of a tiny model: what is run, what is skipped, and what survives failures and kills."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from pacmr_lightning import cli
from pacmr_lightning.sweep import worker
from pacmr_lightning.sweep.cells import cells
from pacmr_lightning.sweep.spec import read_sweep
from pacmr_lightning.sweep.state import prepare

from .conftest import OPTIONS

CELLS = ("dpo-noise30-seed0", "pacmr-noise30-seed0", "dpo-noise30-seed1", "pacmr-noise30-seed1")


def sweep(path: str, *options: str) -> int:
    try:
        cli.main(["sweep", path, *options])
    except SystemExit as stop:
        return stop.code
    return 0


def checkpoint(folder: str) -> dict:
    return torch.load(Path(folder) / "checkpoints/last.ckpt", weights_only=True)


def record(folder: Path) -> dict:
    return json.loads((folder / "cell.json").read_text())


def same(one: str, other: str) -> bool:
    """Whether two runs ended with the same adapter, bit for bit, and the same numbers."""
    states = [checkpoint(folder)["state_dict"] for folder in (one, other)]
    summaries = [json.loads((Path(folder) / "summary.json").read_text()) for folder in (one, other)]
    for summary in summaries:
        del summary["seconds"], summary["wall_seconds"]
    equal = all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    return equal and states[0].keys() == states[1].keys() and summaries[0] == summaries[1]


def wait_for(condition) -> object:
    """What the condition says once it holds; the deadline only guards against a hang."""
    deadline = time.monotonic() + 600
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def cells_of(sweep: int) -> list[psutil.Process]:
    """The processes of cells below a sweep's: each leads a group of its own."""
    found = []
    for process in psutil.Process(sweep).children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            found += [process] * (os.getpgid(process.pid) == process.pid)
    return found


@pytest.mark.slow
def test_a_sweep(write_sweep, tmp_path, capsys, tiny_llama):
    """Cells are a plain pacmr fit's; finished ones are skipped; failed ones are named, and run when asked."""
    missing = {"config": "dpo", "options": {"model.policy.model": str(tmp_path / "later")}}
    method = {"options": {"model.weighting.every": 2, "model.weighting.outer.tau": 0.5}}
    path = write_sweep(methods={"dpo": None, "broken": missing, "pacmr": method})
    assert sweep(path) == 1
    said = capsys.readouterr().err
    assert said.count("broken-noise30-seed1 failed: pacmr: error: ") == 2 and "2 of 6 cells failed" in said
    assert len([name for name in CELLS if Path(f"out/{name}/summary.json").exists()]) == 4
    assert Path("out/tables.md").exists() and Path("out/figures/noise-rates.png").exists()

    arguments = record(Path("out/pacmr-noise30-seed1"))["arguments"]
    assert arguments[-2:] == ["--trainer.default_root_dir", "out/pacmr-noise30-seed1"]
    plain = [sys.executable, "-m", "pacmr_lightning", *arguments[:-1], "plain"]
    subprocess.run(plain, check=True, capture_output=True)
    assert same("plain", "out/pacmr-noise30-seed1") and not same("plain", "out/pacmr-noise30-seed0")
    assert checkpoint("plain")["weighting"]["updates"] > 0

    written = {name: Path(f"out/{name}/summary.json").stat().st_mtime_ns for name in CELLS}
    log = Path("out/broken-noise30-seed0/log.txt").stat().st_mtime_ns
    assert sweep(path) == 1 and Path("out/broken-noise30-seed0/log.txt").stat().st_mtime_ns == log
    tiny_llama(tmp_path / "later")
    assert sweep(path, "--retry_failed") == 0
    assert written == {name: Path(f"out/{name}/summary.json").stat().st_mtime_ns for name in CELLS}
    assert "of 6 cells" in capsys.readouterr().err

    # The folders hold what was asked for then, not what is asked for now.
    assert sweep(write_sweep(options={"seed_everything": "{seed}", "data.noise_rate": 0.3})) == 2
    assert "holds a run with other arguments" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cell_after_another(write_sweep, capsys):
    """It waits for that cell, runs its own command first, and is left out where that cell failed."""
    second = {"config": "dpo", "after": "dpo", "first": "audit {after} --top 3"}
    second["options"] = {"model.learning_rate": 1e-4}
    path = write_sweep(methods={"dpo": None, "second": second}, seeds=[0])
    assert sweep(path) == 0
    first, cell = Path("out/dpo-noise30-seed0"), Path("out/second-noise30-seed0")
    assert (first / "audit/pairs.parquet").exists() and (cell / "summary.json").exists()
    assert record(cell)["first"] == ["audit", str(first), "--top", "3"]
    ended = [path.stat().st_mtime_ns for path in (first / "summary.json", first / "audit/report.html")]
    assert ended == sorted(ended) and ended[1] < (cell / "summary.json").stat().st_mtime_ns

    broken = {"options": {"model.policy.model": "nowhere"}}
    assert sweep(write_sweep(methods={"dpo": broken, "second": second}, seeds=[1])) == 1
    said = capsys.readouterr().err
    assert "second-noise30-seed1 was not run: dpo-noise30-seed1 failed" in " ".join(said.split())
    assert not Path("out/second-noise30-seed1").exists()


def test_a_first_command_is_not_run_again(write_sweep):
    """It could refuse to; a fit that was interrupted goes on. A sweep's folder may be written with a dot."""
    second = {"config": "dpo", "after": "dpo", "first": "fit --config dpo --output {folder}/first"}
    second["options"] = {"model.weighting": "AuditedWeights", "model.weighting.audit": "{after}/p.parquet"}
    path = write_sweep(output="./out", methods={"dpo": None, "second": second}, seeds=[0])
    assert sweep(path, "--dry_run") == 0
    cell = cells(read_sweep(path))[1]
    assert prepare(cell) == [[*cell.first, "--ckpt_path", "last"], cell.arguments]
    (cell.folder / "checkpoints").mkdir()
    (cell.folder / "checkpoints/last.ckpt").touch()
    assert prepare(cell) == [[*cell.arguments, "--ckpt_path", "last"]]


def test_preparation(write_sweep, capsys):
    """What is there already is not made; what cannot be made stops the sweep before any cell."""
    Path("there").touch()
    nothing = {"output": "there", "command": "compare never"}
    path = write_sweep(prepare=[nothing, {"output": "nowhere", "command": "compare nowhere"}])
    assert sweep(path) == 2
    assert "did not make nowhere (pacmr: error: " in capsys.readouterr().err
    assert {file.name for file in Path("out").iterdir()} == {".lock", "prepare-2.txt"}


def test_devices(write_sweep, tmp_path, capsys, monkeypatch):
    """Too few GPUs are refused before anything runs; a cell with GPUs is no fork, and sees its own.

    A script stands for the interpreter that such a cell's command is started with.
    """
    wanted = torch.cuda.device_count() + 1
    assert sweep(write_sweep(jobs=1, devices=wanted)) == 2
    assert f"1 jobs with {wanted} GPUs each need {wanted}, but there are" in capsys.readouterr().err
    assert not Path("out").exists()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" "$@"\nexit 3\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with capsys.disabled():  # a fork of this process has the script, and its output
        process = worker.start([["sweep", "x.yaml"], ["never"]], tmp_path / "log.txt", "3,5", "fork")
    process.join()
    assert process.exitcode == 3
    assert (tmp_path / "log.txt").read_text() == "3,5 -m pacmr_lightning sweep x.yaml\n"
    python.write_text("#!/bin/sh\necho Stopped by SIGTERM after update 2.\n")  # so nothing is predicted
    with capsys.disabled():
        process = worker.start([["fit"], ["predict"]], tmp_path / "stopped.txt", "3", "fork")
    process.join()
    assert process.exitcode == 0 and (tmp_path / "stopped.txt").read_text().count("Stopped") == 1


@pytest.mark.slow
def test_kills(write_sweep, capsys, monkeypatch):
    """A killed cell, a Ctrl-C and a kill -9 of the sweep: nothing runs on, and the end is that of one run."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    options = OPTIONS | {"data.source.pairs": 400, "trainer.callbacks+": "held.Held"}  # 50 updates
    path = write_sweep(seeds=[0], jobs=1, options=options)
    cells = [Path(f"out/{name}") for name in CELLS[:2]]

    def interrupt() -> None:
        wait_for((cells[0] / "checkpoints/last.ckpt").exists)
        cells_of(os.getpid())[0].kill()
        wait_for((cells[1] / "checkpoints/last.ckpt").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert sweep(path) == 130
    thread.join()
    said = capsys.readouterr().err
    assert f"{CELLS[0]} failed: killed by SIGKILL" in said
    assert not any((cell / "summary.json").exists() for cell in cells)

    command = [sys.executable, "-m", "pacmr_lightning", "sweep", path, "--retry_failed"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: cells_of(process.pid))
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    gone, alive = psutil.wait_procs(below, timeout=600)
    assert gone and not alive and process.wait() == -signal.SIGKILL

    Path("go-on").touch()
    assert sweep(path) == 0
    assert all(record(cell)["resumed"] for cell in cells)
    assert sweep(write_sweep(seeds=[0], options=options, output="at-once")) == 0
    assert all(same(str(cell), f"at-once/{cell.name}") for cell in cells)
