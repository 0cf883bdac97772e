"""Runs that are killed at any moment, and go on."""

import contextlib
import os
import random
import signal
import time

import pandas as pd
import psutil
import pytest


def wait_for(process, condition):
    """Waits until something is so, or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.001)


def trains_from(run, step):
    """Whether a process that is started now trains, and has reached a checkpoint."""
    config, now = run / "config.yaml", time.time_ns()
    return lambda: (
        config.exists()
        and config.stat().st_mtime_ns > now
        and step <= max((int(p.stem.split("-")[1]) for p in run.glob("checkpoints/step-*.ckpt")), default=0)
    )


def writes(run, process):
    """Whether it is writing a checkpoint."""
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


def killed_at(run, process):
    """What a run was doing when it was killed, as its files show."""
    if writes(run, process):
        return "writing a checkpoint"
    if list(run.rglob(f".*.{process.pid}.partial")):
        return "writing another file"
    return "ending" if (run / "samples.jsonl").exists() else "training"


def kill_and_resume(runs, run, strategy, kills, seed):
    """Kills a run that many times along its way, goes on each time, and returns what the kills hit."""
    rng, hits, options = random.Random(seed), [], ()
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
        hits.append(
            kind if kind == "starting" else killed_at(run, process) if process.returncode else "nothing"
        )
    assert hits.count("nothing") < kills / 3, hits
    runs.resume(run, strategy)
    return hits


def test_three_kills(runs):
    run = runs.folder / "killed"
    hits = kill_and_resume(runs, run, "single", kills=3, seed=1)
    assert "writing a checkpoint" in hits
    runs.assert_as_straight(run, "single")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "zero2", "zero3"])
def test_twenty_kills(runs, strategy):
    run = runs.folder / f"killed-{strategy}"
    hits = kill_and_resume(runs, run, strategy, kills=20, seed=2)
    print(pd.Series(hits).value_counts().to_string())
    runs.assert_as_straight(run, strategy)
