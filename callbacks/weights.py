"""Callbacks that write Parquet files: weights at every visit, and injected label noise."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import check_at_least
from pacmr_lightning.files import replacing
from pacmr_lightning.modules.schedule import datamodule
from pacmr_lightning.runs.folder import NOISE_MASK, WEIGHTS, weight_parts

from .recurring import record_of

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("step", pa.int64()),
        *((name, pa.float32()) for name in ("u", "delta", "a", "b", "weight")),
        ("flipped", pa.bool_()),
    ]
)
"""Columns; ``a`` and ``b`` are null if the weighting has none, ``flipped`` if unknown."""


class WeightRecorder(Callback):
    """Weights of all pairs at every visit, one row per pair per visit.

    Tags: none. Files: ``weights/part-RANK-NNNNN.parquet`` with the columns of ``SCHEMA``;
    ``runs.folder.read_weights`` reads them. Cost: 0.5 ms per update, and about 35 bytes of disk per visit.
    A fit from step s first drops rows of steps >= s, so a resumed run neither repeats nor loses a visit.

    Args:
        rows_per_part: number of visits per file.

    Raises:
        UserError: ``rows_per_part`` is under 1, or the module returns no record.
    """

    def __init__(self, rows_per_part: int = 4096):
        super().__init__()
        check_at_least(1, rows_per_part=rows_per_part)
        self.rows_per_part = rows_per_part
        self._pending: list[pa.Table] = []
        self._next_number = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the rows of steps that this fit will repeat."""
        self._pending = []
        self._next_number = 0
        for part in weight_parts(trainer.default_root_dir):
            rank, number = (int(word) for word in part.stem.split("-")[1:])
            # The modulus assigns parts of a run that had more ranks, too.
            if rank % trainer.world_size == trainer.global_rank and not _trim(part, trainer.global_step):
                continue
            if rank == trainer.global_rank:
                self._next_number = number + 1

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Add the step's pairs, and write a part if there are enough."""
        record = record_of(outputs)
        numbers = {name: getattr(record, name) for name in SCHEMA.names[2:]}
        known = {name: column for name, column in numbers.items() if column is not None}
        # One transfer, since each waits for the GPU.
        rows = torch.stack([column.detach().float() for column in known.values()]).cpu().numpy()
        columns = dict(zip(known, rows, strict=True))
        flipped = columns.pop("flipped")
        count = len(record.ids)
        arrays: dict[str, Any] = {
            "id": record.ids,
            # global_step already counts this update.
            "step": [trainer.global_step - 1] * count,
            **dict.fromkeys(("a", "b"), [None] * count),
            **columns,
            "flipped": pa.array(flipped == 1, mask=flipped == UNKNOWN),
        }
        self._pending.append(pa.table(arrays, schema=SCHEMA))
        if sum(len(table) for table in self._pending) >= self.rows_per_part:
            self.on_save_checkpoint(trainer)

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        """Write the remaining rows; before a checkpoint these are the rows of all its steps."""
        if not self._pending:
            return
        name = f"part-{trainer.global_rank:03d}-{self._next_number:05d}.parquet"
        with replacing(Path(trainer.default_root_dir) / WEIGHTS / name) as temporary:
            pq.write_table(pa.concat_tables(self._pending), temporary)
        self._pending = []
        self._next_number += 1

    on_train_end = on_exception = on_save_checkpoint  # type: ignore[assignment]


class NoiseMask(Callback):
    """Injected label noise of the training rows.

    Tags: none. Files: ``noise_mask.parquet``, written before training, with ``id``, ``flipped``,
    ``texts`` (a hash) and, if known, ``annotator`` of each training row; none for data without
    ``noise_flips``. Cost: none in training.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file on rank 0."""
        data = datamodule(trainer)
        flips, annotators = (getattr(data, name, None) for name in ("noise_flips", "annotators"))
        if flips is None or not trainer.is_global_zero:
            return
        columns = {"id": pa.array(flips, pa.string()), "flipped": pa.array(flips.values(), pa.bool_())}
        if texts := getattr(data, "noise_texts", None):
            columns["texts"] = pa.array(map(texts.get, flips), pa.string())
        if annotators is not None:
            columns["annotator"] = pa.array((annotators[pair] for pair in flips), pa.string())
        table = pa.table(columns)
        with replacing(Path(trainer.default_root_dir) / NOISE_MASK) as temporary:
            pq.write_table(table, temporary)


def _trim(part: Path, step: int) -> bool:
    table = pq.read_table(part)
    kept = table.filter(pc.less(table["step"], step))
    if len(kept) == 0:
        part.unlink()
        return False
    if len(kept) < len(table):
        with replacing(part) as temporary:
            pq.write_table(kept, temporary)
    return True
