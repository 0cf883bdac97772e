"""``pacmr`` on a disk that takes a while, so that a kill can hit it while it writes."""

import os
import sys
import time

from pacmr_lightning.cli import main

fsync = os.fsync


def slow_fsync(file):
    time.sleep(float(os.environ["SECONDS_OF_FSYNC"]))
    fsync(file)


if __name__ == "__main__":
    os.fsync = slow_fsync
    main(sys.argv[1:])
