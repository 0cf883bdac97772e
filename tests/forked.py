"""Processes that a test may watch, limit and kill, forked from one that has imported everything.

Importing takes as long as ten short runs. Python's fork server imports once; what is forked from it is a
process of its own in all that the tests look at: it dies alone, has its own locks and its own exit status.
"""

import multiprocessing
import os
import signal
import threading

IMPORTED = [
    "pacmr_lightning.commands.fit",
    "pacmr_lightning.datamodules",
    "pacmr_lightning.callbacks",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
    "peft.utils.transformers_weight_conversion",
]
"""Modules that the server imports."""

START = """
import datasets, os, sys
from pathlib import Path
os.setsid()
for number, end in ((1, output), (2, errors)):
    os.dup2(end.fileno(), number)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
datasets.config.HF_DATASETS_CACHE = Path(environment["HF_DATASETS_CACHE"])  # it was read at the import
sys.argv = arguments
exec(compile(code, "<code of a test>", "exec"), {"__name__": "__main__"})
"""


class Process:
    """Runs code in a new process that leads a group of its own; used like ``subprocess.Popen``.

    Args:
        code: Python's, as after ``python -c``.
        arguments: ``sys.argv[1:]`` of it.
        merge: errors go where the output goes.
        environment: variables beside those of this process.
    """

    def __init__(self, code: str, *arguments: object, merge: bool = False, **environment: str):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        reader, output = context.Pipe(duplex=False)
        error_reader, errors = (None, output) if merge else context.Pipe(duplex=False)
        given = {
            **{"code": code, "arguments": ["-c", *map(str, arguments)], "folder": os.getcwd()},
            **{"environment": {**os.environ, **environment}, "output": output, "errors": errors},
        }
        self._process = context.Process(target=exec, args=(START, given))
        self._process.start()
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        self.stderr = None if merge else os.fdopen(os.dup(error_reader.fileno()), encoding="utf-8")
        for end in (reader, error_reader, output, errors):
            if end is not None and not end.closed:
                end.close()

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        self._process.join()
        return self.returncode

    def communicate(self, timeout: float = 600) -> tuple[str, str | None]:
        """All that it still says, after its end; ``timeout`` only guards against a hang."""
        guard = threading.Timer(timeout, self.kill)
        guard.start()
        said = []
        reader = threading.Thread(target=lambda: said.append(self.stderr.read() if self.stderr else None))
        reader.start()
        output = self.stdout.read()
        reader.join()
        self.wait()
        guard.cancel()
        return output, said[0]

    def kill(self) -> None:
        if self.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no group of its own yet, or has ended
                self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)
