"""A progress line on stderr for work that takes long."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST = 1.0
"""Seconds until the first line."""
LOG = 30.0
"""Seconds between two lines where no terminal shows them."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Print ``what`` once the block has taken a second, then the elapsed time; on rank 0 only.

    A terminal has one line, whose seconds count; a log has a line every half minute.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" or os.environ.get("RANK", "0") != "0":
        yield
        return
    done, start, terminal = threading.Event(), time.monotonic(), sys.stderr.isatty()
    before, end = ("\r", "") if terminal else ("", "\n")

    def speak() -> None:
        if done.wait(FIRST):
            return
        said = f"{what} ..."
        print(said, end=end, file=sys.stderr, flush=True)
        while not done.wait(1.0 if terminal else LOG):
            said = f"{what} ... {time.monotonic() - start:.0f} s"
            print(f"{before}{said}", end=end, file=sys.stderr, flush=True)
        if terminal:
            print("\r" + " " * len(said) + "\r", end="", file=sys.stderr, flush=True)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()
