"""Runs that are killed at any moment, told to stop, or out of disk space, and go on.

In one file, so that one process compares all of them with the same straight runs.
"""

import contextlib
import os
import random
import signal
import time

import psutil
import pytest

from ..callbacks.test_checkpoint import step_of


def wait_for(process, condition):
    while process.poll() is None and not condition():
        time.sleep(0.001)


def trains_from(run, step):
    config, now = run / "config.yaml", time.time_ns()
    return lambda: (
        config.exists()
        and config.stat().st_mtime_ns > now
        and step <= max((int(p.stem.split("-")[1]) for p in run.glob("checkpoints/step-*.ckpt")), default=0)
    )


def writes(run, process):
    return list(run.glob(f"checkpoints/.*.{process.pid}.partial"))


def frozen_writing(run, process):
    """Stops the run, which goes on unless it writes a checkpoint; whether it writes or has ended."""
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        os.killpg(process.pid, signal.SIGSTOP)
        while psutil.Process(process.pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(0.001)
        if writes(run, process):
            return True
        os.killpg(process.pid, signal.SIGCONT)
    return process.poll() is not None


def killed(runs, run, strategy, kills, seed):
    """Kills a run that many times along its way, each time after going on."""
    rng, met, options = random.Random(seed), 0, ()
    for kill in range(kills):
        reached = runs.saved_every * (runs.updates * kill // kills // runs.saved_every)
        # However late a kill comes, it meets a run that has not ended; the last ones may meet its end.
        held = {"HELD_AFTER": reached + 2 * runs.saved_every, "GO_ON": run / "never"}
        process = runs.start(run, strategy, *options, fsync=0.1, **held)
        options = ("--ckpt_path", "last")
        kind = rng.choice(["starting", "checkpoint", "checkpoint", "any", "any"]) if kill else "checkpoint"
        if kind == "starting":
            time.sleep(rng.uniform(1, 8))
        else:
            wait_for(process, trains_from(run, reached))
            if kind == "any":
                # The end, with its figures and samples, takes longer than some updates.
                time.sleep(rng.uniform(0, 4 if reached == runs.updates - runs.saved_every else 0.8))
            else:
                # One of the two files that are written next.
                for _ in range(rng.randint(1, 2)):
                    wait_for(process, lambda process=process: not writes(run, process))
                    wait_for(process, lambda process=process: writes(run, process))
                time.sleep(rng.uniform(0, 0.1))
                while not frozen_writing(run, process):
                    wait_for(process, lambda process=process: writes(run, process))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        assert "Traceback" not in output, output
        met += process.returncode != 0
    assert met > 2 / 3 * kills


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "zero2", "zero3"])
def test_twenty_kills(runs, strategy):
    run = runs.folder / f"killed-{strategy}"
    killed(runs, run, strategy, kills=20, seed=2)
    runs.resume(run, strategy)
    runs.assert_as_straight(run, strategy)


def stop_and_resume(runs, run, strategy, number, status, *options, everybody=False, after=8):
    """Sends a signal once a checkpoint is there, and goes on after that."""
    go_on = runs.folder / f"{run.name}-goes-on"
    process = runs.start(run, strategy, *options, HELD_AFTER=after, GO_ON=go_on)
    wait_for(process, trains_from(run, after))
    assert process.poll() is None, process.communicate()[0]
    (os.killpg if everybody else os.kill)(process.pid, number)
    go_on.touch()
    output = runs.finish(process, status)
    step = step_of(run / "checkpoints" / "last.ckpt")
    assert after <= step <= after + runs.saved_every < runs.updates
    said = f"Stopped by {number.name} after update {step}; go on with the same command and --ckpt_path last."
    assert output.count(said) == 1 and output.count("Stopped by") == 1, output
    assert not (run / "summary.json").exists()
    runs.resume(run, strategy)
    runs.assert_as_straight(run, strategy)


def test_a_kill_and_a_signal(runs):
    """The signal meets a run that goes on after the kill, and ends it after the update that is done."""
    run = runs.folder / "killed"
    killed(runs, run, "single", kills=1, seed=1)
    assert list(run.glob("checkpoints/.*.partial"))  # it was writing one
    stop_and_resume(runs, run, "single", signal.SIGTERM, 0, "--ckpt_path", "last", after=12)


@pytest.mark.slow
def test_ctrl_c(runs):
    stop_and_resume(runs, runs.folder / "ctrl-c", "single", signal.SIGINT, 130)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "everybody"),
    [(signal.SIGTERM, 0, False), (signal.SIGTERM, 0, True), (signal.SIGINT, 130, True)],
)
def test_a_signal_ends_two_processes(runs, number, status, everybody):
    run = runs.folder / f"ddp-{number.name}-{everybody}"
    stop_and_resume(runs, run, "ddp", number, status, everybody=everybody)


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
    """A limit on the size of files (in KB) stands for the disk: TensorBoard's fills it, then a checkpoint."""
    run, options = runs.folder / f"full-{strategy}", ()
    for limit in (200, 50):
        output = runs.finish(runs.start(run, strategy, *options, FILE_LIMIT=1024 * limit), status=2)
        lines = [line for line in output.splitlines() if line.startswith("pacmr: ")]
        assert len(lines) == 1 and "The disk is full" in lines[0], output
        assert not list(run.rglob(".*.partial"))
        assert step_of(run / "checkpoints" / "last.ckpt") == 10
        options = ("--ckpt_path", "last")
    runs.resume(run, strategy)
    runs.assert_as_straight(run, strategy)
