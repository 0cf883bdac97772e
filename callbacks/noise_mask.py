"""Keeps with a run which labels its noise flipped."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch import Callback, LightningModule, Trainer

from pacmr_lightning.files import replacing
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.runs.folder import NOISE_MASK


class NoiseMask(Callback):
    """Writes ``noise_mask.parquet`` into the run's folder: ``id`` and ``flipped`` of every training row,
    and its ``annotator`` where annotators are known.

    Rows that are dropped are in it too, so the mask holds for any tokenizer and any other tool. There is no
    file where no noise was injected. ``NoiseFromMask`` trains on the same labels again.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file on rank zero."""
        data = datamodule(trainer)
        flips, annotators = (getattr(data, name, None) for name in ("noise_flips", "annotators"))
        if flips is None or not trainer.is_global_zero:
            return
        columns = {"id": pa.array(flips, pa.string()), "flipped": pa.array(flips.values(), pa.bool_())}
        if annotators is not None:
            columns["annotator"] = pa.array((annotators[pair] for pair in flips), pa.string())
        table = pa.table(columns)
        with replacing(Path(trainer.default_root_dir) / NOISE_MASK) as temporary:
            pq.write_table(table, temporary)
