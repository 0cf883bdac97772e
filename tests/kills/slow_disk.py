"""``pacmr`` on a disk that takes a while, so that a kill can hit a write, and that may fill or stop.

Variables: ``SECONDS_OF_FSYNC``; ``FILE_LIMIT``, the bytes that no file may pass; ``HELD_AFTER``, the update
after whose checkpoint no other is written before there is a file ``GO_ON``.
"""

import os
import re
import resource
import sys
import time
from pathlib import Path

from pacmr_lightning.cli import main

fsync = os.fsync


def slow_fsync(file):
    time.sleep(float(os.environ["SECONDS_OF_FSYNC"]))
    number = file if isinstance(file, int) else file.fileno()
    checkpoint = re.search(r"step-(\d+)\.ckpt", os.readlink(f"/proc/self/fd/{number}"))
    if checkpoint and int(checkpoint[1]) > int(os.environ.get("HELD_AFTER", sys.maxsize)):
        while not Path(os.environ["GO_ON"]).exists():
            time.sleep(0.01)
    fsync(file)


if __name__ == "__main__":
    os.fsync = slow_fsync
    if limit := os.environ.get("FILE_LIMIT"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    main(sys.argv[1:])
