"""Worker process of a sweep, forked from a server with all imports but no tensor operation."""

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
from typing import Any

from .state import STOPPED, last_line

IMPORTED = [
    "pacmr_lightning.commands.fit",
    # imported lazily by a run
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
    "peft.utils.transformers_weight_conversion",
]


def start(
    commands: list[list[str]], log: Path, devices: str | None, method: str = "forkserver"
) -> BaseProcess:
    """Start ``pacmr`` commands, one after the other; output goes to ``log``, the first failure ends them.

    ``devices`` is ``CUDA_VISIBLE_DEVICES`` of subprocesses; None: a process by multiprocessing's ``method``.
    """
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=_run, args=(commands, log, devices))
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    """Kill a process and its descendants, and wait for it."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group yet, or has ended
        process.kill()
    process.join()


def finish(process: BaseProcess) -> int:
    """Wait for a process and return its exit status; nothing of it outlives an exception."""
    try:
        process.join()
    finally:
        kill(process)
    assert process.exitcode is not None
    return process.exitcode


def _run(commands: list[list[str]], log: Path, devices: str | None) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    # Else Lightning, in a SLURM job, would take the run for a task of srun.
    os.environ.pop("SLURM_NTASKS", None)
    for arguments in commands:
        if devices is None:
            if "SLURM_JOB_ID" not in os.environ:
                os.environ["CUDA_VISIBLE_DEVICES"] = ""
            sys.argv = ["pacmr", *arguments]
            runpy.run_module("pacmr_lightning", run_name="__main__")
        else:
            # Lightning restarts the command for each GPU, which this process cannot do. At SIGTERM the
            # command saves its state, and this process waits for it.
            signal.signal(signal.SIGTERM, lambda *_: None)
            command = [sys.executable, "-m", "pacmr_lightning", *arguments]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices}
            status = subprocess.run(command, env=environment).returncode
            if status or last_line(log).startswith(STOPPED):
                sys.exit(status)


def _end_with_parent() -> None:
    """Kill the run when the sweep dies, since the next sweep uses its folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # ``start`` made this process
    parent.join()
    os.killpg(0, signal.SIGKILL)
