"""Processes that end with the one that has started them. Linux only."""

import ctypes
import signal


def end_with_parent() -> None:
    """Have this process killed when the one that has started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
