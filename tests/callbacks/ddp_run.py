"""Two gloo processes: three epochs at once, and two epochs that are then resumed for the third."""

import sys
from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint

from pacmr_lightning.callbacks import RunSummary, VNetSurfaces, WeightDistributions, WeightRecorder
from tests.callbacks.conftest import Ordered, run


def callbacks():
    drawing = [VNetSurfaces([7], points=11, window=20), WeightDistributions([7], window=20)]
    keep_all = ModelCheckpoint(every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    return [WeightRecorder(rows_per_part=6), RunSummary(window=50), *drawing, keep_all]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    options = {"devices": 2, "strategy": "ddp"}
    run(folder / "whole", callbacks(), data=Ordered(), **options)
    first = run(folder / "resumed", callbacks(), data=Ordered(), **options)
    checkpoints = Path(first.checkpoint_callback.dirpath)
    run(folder / "resumed", callbacks(), data=Ordered(), resume=checkpoints / "epoch=1.ckpt", **options)
