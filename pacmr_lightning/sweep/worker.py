"""A process that runs commands of ``pacmr``, forked from a server that has imported everything.

Importing takes as long as a short run. Python's fork server imports once and forks for each cell; it runs no
tensor operation, so neither threads nor a GPU's state are forked.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path

IMPORTED = [
    "pacmr_lightning.commands.fit",
    # What a run imports when it comes to it.
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
    "peft.utils.transformers_weight_conversion",
]
"""Modules that the server imports."""


def start(commands: list[list[str]], log: Path, devices: str | None) -> BaseProcess:
    """Starts ``pacmr`` with these arguments, once or several times one after the other.

    Args:
        commands: arguments of ``pacmr``; the first failure ends the process.
        log: file that its output is added to.
        devices: ``CUDA_VISIBLE_DEVICES`` of a process that is no fork; None: a fork.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=_run, args=(commands, log, devices))
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    """Ends a started process and all that it has started, and waits for it."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet, or has ended
        process.kill()
    process.join()


def _run(commands: list[list[str]], log: Path, devices: str | None) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    for arguments in commands:
        if devices is None:
            sys.argv = ["pacmr", *arguments]
            runpy.run_module("pacmr_lightning", run_name="__main__")
        else:
            # Over several GPUs, Lightning starts the command again for each, which it cannot do from a fork.
            command = [sys.executable, "-m", "pacmr_lightning", *arguments]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices}
            if status := subprocess.run(command, env=environment).returncode:
                sys.exit(status)


def _end_with_parent() -> None:
    """A sweep that is killed leaves no run behind, which would write to a folder that the next one uses."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # ``start`` made this process
    parent.join()
    os.killpg(0, signal.SIGKILL)
