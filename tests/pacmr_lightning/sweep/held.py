"""A callback that holds a run, so that a kill meets one that is certain not to have ended."""

import time
from pathlib import Path

from lightning.pytorch import Callback

AFTER = 25
"""The update that a run does not go beyond before the working directory has a file ``go-on``."""


class Held(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        # A signal may come when the run is held already; RunCheckpoint stops the run before its next update.
        checkpoint = trainer.checkpoint_callback
        while trainer.global_step >= AFTER and not (Path("go-on").exists() or checkpoint._received):
            time.sleep(0.01)
