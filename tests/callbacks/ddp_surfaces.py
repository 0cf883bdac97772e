"""A run of two gloo processes with both callbacks that look at the last visits.

Usage: python ddp_surfaces.py FOLDER
"""

import sys
from pathlib import Path

from conftest import Ordered, run
from lightning.pytorch.callbacks import ModelCheckpoint

from pacmr_lightning.callbacks.vnet_surfaces import VNetSurfaces
from pacmr_lightning.callbacks.weight_distributions import WeightDistributions


def callbacks():
    return [
        VNetSurfaces(steps=[7], points=11, window=20),
        WeightDistributions(steps=[7], window=20),
        ModelCheckpoint(every_n_epochs=1, save_top_k=-1, filename="{epoch}"),
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    options = {"devices": 2, "strategy": "ddp"}
    first = run(folder / "whole", callbacks(), data=Ordered(), **options)
    checkpoint = Path(first.checkpoint_callback.dirpath) / "epoch=1.ckpt"
    run(folder / "resumed", callbacks(), data=Ordered(), resume=checkpoint, **options)
