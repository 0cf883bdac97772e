"""Import of PyTorch and its libraries, which takes seconds."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..waiting import waiting


@contextmanager
def loading() -> Iterator[None]:
    """Show a progress line, and disable garbage collection, which takes a fifth of the import time.

    Later collections skip what the block imported, else the one at the end of the process takes two seconds.
    """
    collects, loaded = gc.isenabled(), "torch" in sys.modules
    gc.disable()
    try:
        with waiting("Loading PyTorch and its libraries"):
            yield
    finally:
        if collects:
            if not loaded or not gc.get_freeze_count():
                gc.freeze()
            gc.enable()
