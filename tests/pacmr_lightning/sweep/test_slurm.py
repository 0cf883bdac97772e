"""Sweeps as jobs: real ones of submitit's local executor, and what SLURM's commands get and say."""

import contextlib
import os
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from pacmr_lightning.errors import UserError
from pacmr_lightning.sweep import slurm
from pacmr_lightning.sweep.cells import cells
from pacmr_lightning.sweep.slurm import SlurmOptions
from pacmr_lightning.sweep.spec import read_sweep
from pacmr_lightning.sweep.state import reason, state_of

from .conftest import OPTIONS
from .test_runner import record, same, sweep, wait_for

SECOND = {"config": "dpo", "after": "dpo", "options": {"model.learning_rate": 1e-4}}
SUBMIT = ("--launcher", "slurm")
MADE = {"output": "nowhere", "command": "compare nothing"}


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """SLURM's commands as scripts: each runs NAME.says, and keeps its words in NAME.words."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "srun", "squeue"):
        script = f'#!/bin/sh\necho "$@" >> {folder}/{name}.words\n. {folder}/{name}.says\n'
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
        (folder / f"{name}.says").touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def say(commands: Path, name: str, *lines: str, status: int = 0, to: str = "") -> None:
    said = "".join(f'echo "{line}" {to}\n' for line in lines)
    (commands / f"{name}.says").write_text(f"{said}exit {status}\n")


def task_of(job: str) -> psutil.Process:
    """The process that submitit started for a local job, below the one that starts it again."""
    return wait_for(lambda: psutil.Process(int(job)).children())[0]


def run_of(job: str) -> psutil.Process | None:
    """The run below it, which leads a group of its own."""
    below = task_of(job).children()
    return next((process for process in below if os.getpgid(process.pid) == process.pid), None)


@pytest.fixture
def no_job_left():
    """Kills the jobs of a test that has failed, which would wait for ever."""
    yield
    there = [job for job in psutil.Process().children() if job.status() != psutil.STATUS_ZOMBIE]
    jobs = [job for job in there if "submitit.local._local" in job.cmdline()]
    for process in [each for job in jobs for each in (job, *job.children(recursive=True))]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.slow
def test_jobs(write_sweep, commands, monkeypatch, no_job_left):
    """A job at the end of its time goes on, and a kill is recorded; nothing in the result is otherwise than
    without jobs."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_NTASKS", "2")  # else Lightning wants those of srun, too
    options = OPTIONS | {"data.source.pairs": 400, "trainer.callbacks+": "held.Held"}  # 50 updates
    spec = {"methods": {"dpo": None, "second": SECOND}, "options": options}
    swept = read_sweep(write_sweep(**spec))
    found = cells(swept)
    slurm.submit(swept, found, SlurmOptions(), None, "local")
    (first, second), (killed, after) = found[:2], found[2:]
    assert record(first.folder)["job"] != record(killed.folder)["job"]
    assert [state_of(cell) for cell in found] == ["submitted", "waiting"] * 2

    for cell in (first, killed):
        wait_for((cell.folder / "checkpoints/last.ckpt").exists)
    # The job that starts late leaves the other waiting at its held update.
    stopped = task_of(record(first.folder)["job"])
    stopped.send_signal(signal.SIGUSR2)
    run_of(record(killed.folder)["job"]).kill()
    stopped.wait()
    assert "Stopped by SIGTERM after update" in (first.folder / "log.txt").read_text()
    wait_for(lambda: state_of(killed) == "failed")
    assert reason(killed).startswith("killed by SIGKILL") and state_of(after) == "waiting"
    wait_for(lambda: record(first.folder)["resumed"])

    # A kill of the job takes its run along; SLURM says that it has ended.
    job = record(first.folder)["job"]
    run = wait_for(lambda: run_of(job))
    tasks = [psutil.Process(int(job)), task_of(job)]
    for process in tasks:
        process.kill()
    run.wait()
    slurm.refresh(found)
    assert state_of(first) == "failed" and reason(first).startswith(f"job {job} ended without a record")

    Path("go-on").touch()
    for done in ((first, killed), (second, after)):
        left = [cell for cell in found if state_of(cell) != "done"]
        slurm.submit(swept, left, SlurmOptions(), None, "local")
        wait_for(lambda done=done: {state_of(cell) for cell in done} == {"done"})
    assert record(first.folder)["resumed"] and record(killed.folder)["resumed"]
    plain = {"output": "plain", "methods": {"dpo": None}, "seeds": [0]}
    assert sweep(write_sweep(**spec | plain)) == 0
    assert same(str(first.folder), f"plain/{first.name}")


def test_what_slurm_gets_and_says(write_sweep, commands, capsys):
    """One array; the same command shows states, and retries what failed."""
    spec = {"methods": {"dpo": None, "second": SECOND}, "noise_rates": [0.2, 0.3], "devices": 2}
    path = write_sweep(**spec)
    more = ["--slurm.time", "2:00:00", "--slurm.sbatch", '{"partition": "gpu", "mem": "64G"}', "--jobs", "3"]
    words = commands / "sbatch.words"
    say(commands, "sbatch", f"Submitted batch job $((5 + $(wc -l < {words})))")
    say(commands, "squeue", "6_0|RUNNING", "6_1|PENDING", "5|RUNNING", "6_3|PENDING")
    assert sweep(path, *SUBMIT, *more) == 1
    said = "".join(capsys.readouterr())
    (array,) = (Path(line).read_text() for line in words.read_text().split())
    asked = ("partition=gpu", "time=120", "signal=USR2@300", "requeue", "mem=64G", "gpus-per-node=2")
    for line in (*asked, "array=0-3%3"):
        assert f"#SBATCH --{line}\n" in array
    assert "Submitted 4 cells" in said
    assert "second-noise20-seed0 is not submitted: dpo-noise20-seed0 is not done" in said
    assert "dpo-noise20-seed0 is submitted as job 6_0 (RUNNING)" in said
    assert "dpo-noise30-seed0 is submitted as job 6_1 (PENDING)" in said
    assert "dpo-noise20-seed1 failed: job 6_2 ended without a record (sacct -j 6_2 may say why)" in said

    # Nothing of it is submitted twice, but what failed is if asked.
    assert sweep(path, *SUBMIT) == 1 and len(words.read_text().split()) == 1
    say(commands, "squeue", "6_0|RUNNING", "6_1|PENDING", "6_3|PENDING", "7|PENDING")
    assert sweep(path, *SUBMIT, "--retry_failed") == 0
    assert "Submitted 1 cells" in "".join(capsys.readouterr())
    say(commands, "squeue", "slurm_load_jobs error: Unable to contact slurm controller", status=1, to=">&2")
    assert sweep(path, "--tables_only") == 0
    said = capsys.readouterr()
    assert "Unable to contact slurm controller; try again later" in said.err
    assert "dpo-noise20-seed1 is submitted as job 7 (SLURM does not answer here)" in said.out


def test_what_a_job_runs(write_sweep, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    swept = read_sweep(write_sweep())
    (cell, *_) = cells(swept)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "3")
    slurm.state.submitted(cell, "4")
    slurm.Job(swept, cell, 60)()
    assert state_of(cell) == "submitted" and not (cell.folder / "log.txt").exists()
    slurm.state.submitted(cell, "3")
    slurm.Job(replace(swept, devices=9), cell, 60)()
    assert state_of(cell) == "failed" and reason(cell).startswith("1 jobs with 9 GPUs each need 9")


@pytest.mark.parametrize(
    ("made", "options", "why"),
    [
        ([], ["--slurm.time", "2:00:00"], "--slurm options have no effect without --launcher slurm"),
        ([], [*SUBMIT, "--slurm.time", "0:00:30"], "--slurm.time is 0:00:30, but it must be at least 0:01"),
        ([], [*SUBMIT, "--slurm.sbatch", '{"partition": "x"}'], "jobs here: sbatch: error: no partition x"),
        ([MADE], SUBMIT, "nowhere is missing, which the cells need; make it in a job of its own"),
    ],
)
def test_what_is_refused(write_sweep, commands, capsys, made, options, why):
    say(commands, "sbatch", "sbatch: error: no partition x", status=1, to=">&2")
    assert sweep(write_sweep(methods={"dpo": None}, prepare=made), *options) == 2
    assert why in capsys.readouterr().err and not any(Path("out").glob("*/cell.json"))
    assert (commands / "sbatch.words").exists() == ("sbatch" in why)


def test_what_is_missing(write_sweep, monkeypatch):
    swept = read_sweep(write_sweep())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="SLURM takes no jobs here: Could not detect"):
        slurm.submit(swept, cells(swept), SlurmOptions(time=timedelta(hours=1)), None)
    monkeypatch.setitem(__import__("sys").modules, "submitit", None)
    with pytest.raises(UserError, match=r"pip install 'pacmr-lightning\[slurm\]'"):
        slurm.submit(swept, cells(swept), SlurmOptions(), None)
