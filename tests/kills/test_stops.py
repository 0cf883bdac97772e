"""Runs that are told to stop, or out of disk space, and go on."""

import os
import signal
import time

import pytest
import torch


def step_of(path):
    return torch.load(path, weights_only=True)["global_step"]


def stop_and_resume(runs, run, strategy, number, status, everybody=False):
    """Sends a signal when the second checkpoint is there, and goes on after that."""
    go_on = runs.folder / f"{run.name}-goes-on"
    process = runs.start(run, strategy, HELD_AFTER=8, GO_ON=go_on)
    while not (run / "checkpoints" / "step-8.ckpt").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)
    (os.killpg if everybody else os.kill)(process.pid, number)
    go_on.touch()
    output = runs.finish(process, status)
    stopped = step_of(run / "checkpoints" / "last.ckpt")
    assert 8 <= stopped <= 12 < runs.updates
    said = (
        f"Stopped by {number.name} after update {stopped}; go on with the same command and --ckpt_path last."
    )
    assert output.count(said) == 1 and output.count("Stopped by") == 1, output
    assert not (run / "summary.json").exists()
    runs.resume(run, strategy)
    runs.assert_as_straight(run, strategy)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_update_that_is_done(runs, number, status):
    stop_and_resume(runs, runs.folder / number.name, "single", number, status)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "everybody"),
    [(signal.SIGTERM, 0, False), (signal.SIGTERM, 0, True), (signal.SIGINT, 130, True)],
)
def test_a_signal_ends_two_processes(runs, number, status, everybody):
    """A batch system signals one process or all of them, Ctrl-C all."""
    stop_and_resume(runs, runs.folder / f"ddp-{number.name}-{everybody}", "ddp", number, status, everybody)


@pytest.mark.slow
def test_slurm_gets_its_job_back(runs, tmp_path, monkeypatch):
    """A script stands for SLURM's scontrol; the signal is that of Lightning's SLURMEnvironment."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}
    for name, value in {**job, "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}.items():
        monkeypatch.setenv(name, value)
    stop_and_resume(runs, runs.folder / "slurm", "single", signal.SIGUSR1, 0)
    assert (tmp_path / "said").read_text() == "requeue 17\n"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_full_disk(runs, strategy):
    """A limit on the size of files (in KB) stands for the disk: over at a figure, then at a checkpoint."""
    run, options = runs.folder / f"full-{strategy}", ()
    for limit in (150, 50):
        output = runs.finish(runs.start(run, strategy, *options, FILE_LIMIT=1024 * limit), status=2)
        lines = [line for line in output.splitlines() if line.startswith("pacmr: ")]
        assert len(lines) == 1 and "The disk is full" in lines[0], output
        assert not list(run.rglob(".*.partial"))
        assert step_of(run / "checkpoints" / "last.ckpt") == 8
        options = ("--ckpt_path", "last")
    runs.resume(run, strategy)
    runs.assert_as_straight(run, strategy)
