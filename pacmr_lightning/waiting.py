"""A progress line on stderr for work that takes long."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST = 1.0
"""Seconds until the first line."""
NEXT = 30.0
"""Seconds between two lines."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Print ``what`` once the block has taken a second, then the elapsed time; on rank 0 only."""
    if os.environ.get("LOCAL_RANK", "0") != "0" or os.environ.get("RANK", "0") != "0":
        yield
        return
    done, start = threading.Event(), time.monotonic()

    def speak() -> None:
        if done.wait(FIRST):
            return
        print(f"{what} ...", file=sys.stderr, flush=True)
        while not done.wait(NEXT):
            print(f"{what} ... {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()
