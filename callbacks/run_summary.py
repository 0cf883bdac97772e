"""Callback that writes a run's final metrics."""

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning
import peft
import torch
import transformers
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.files import write_json
from pacmr_lightning.modules.metrics import PAIR_WEIGHTS, weight_gap
from pacmr_lightning.modules.schedule import datamodule
from pacmr_lightning.objectives import Objective
from pacmr_lightning.runs.folder import SUMMARY
from pacmr_lightning.weighting import VNetWeighting

from .recurring import VisitsCallback


class RunSummary(VisitsCallback):
    """Final metrics of a run, in ``summary.json`` of its folder; docs/files.md explains its keys.

    Tags: none. Files: ``summary.json``, at the end of fit. Cost: 0.2 ms per update.

    Args:
        window: number of last visits in the statistics; see ``VisitsCallback``.

    Raises:
        UserError: ``window`` is under 1, or the module returns no record.
    """

    def __init__(self, window: int = 2000):
        super().__init__(window)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded after this."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._began = time.perf_counter()
            self._rows: Tensor | None = None
            self._seconds = self._wall = 0.0
            self._metrics: dict[str, float] = {}
            self._val_step: int | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the visits of all ranks, the time, and the validation's metrics."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint[type(self).__name__] |= {
            "seconds": self._seconds,
            "wall_seconds": self._wall + time.perf_counter() - self._began,
            "metrics": self._last_metrics(trainer),
            "val_step": self._val_step,
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the state, on any number of ranks."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if state := checkpoint.get(type(self).__name__):
            self._seconds, self._wall = state["seconds"], state["wall_seconds"]
            self._metrics, self._val_step = state["metrics"], state["val_step"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and remove the summary of an earlier fit."""
        if trainer.is_global_zero:
            (Path(trainer.default_root_dir) / SUMMARY).unlink(missing_ok=True)
        self._mark = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the update, and restart the clock, which excludes validation."""
        if not trainer.sanity_checking:
            self._val_step = trainer.global_step
        self._mark = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Add the step's pairs and its time."""
        super().on_train_batch_end(trainer, pl_module, outputs)
        self._metrics.pop("val/guard/restored_step", None)  # of an end after which the run went on
        now = time.perf_counter()
        self._seconds += now - self._mark
        self._mark = now

    def process(self, trainer: Trainer, pl_module: LightningModule, rows: Tensor) -> None:
        """Keep the last visits."""
        self._rows = rows

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file, after every callback's ``on_train_end`` has added its metrics."""
        if not trainer.is_global_zero:
            return
        path, rows = Path(trainer.default_root_dir) / SUMMARY, self._rows
        if rows is None:
            # A resumed fit without updates left did not train. It keeps an existing summary, and writes a
            # missing one: the run was killed after its last checkpoint.
            rows = self.of_this_rank()
            if path.exists() or not len(rows):
                return
        data = datamodule(trainer)
        metrics = self._last_metrics(trainer)
        objective = getattr(pl_module, "objective", None)
        learned = objective.learned() if isinstance(objective, Objective) else {}
        summary = {
            "method": pl_module.method,
            "task": None if data is None else data.task,
            "noise_rate": None if data is None else data.noise_rate,
            "seed": int(seed) if (seed := os.environ.get("PL_GLOBAL_SEED")) else None,
            "val_accuracy": metrics.get("val/rewards/accuracies"),
            "val_margin": metrics.get("val/rewards/margins"),
            "val_pairs": _validated(trainer),
            "val_step": self._val_step,
            "steps": trainer.global_step,
            **_statistics(rows),
            "seconds": self._seconds,
            "wall_seconds": self._wall + time.perf_counter() - self._began,
            "metrics": metrics,
            **({"learned": learned} if learned else {}),
            **_of_vnet(pl_module),
            "counts": None if data is None else data.counts,
            "versions": {
                one.__name__: str(one.__version__) for one in (torch, lightning, transformers, peft)
            },
        }
        # JSON has neither NaN nor infinities.
        finite = json.loads(json.dumps(summary), parse_constant=lambda constant: None)
        write_json(path, finite)

    def _last_metrics(self, trainer: Trainer) -> dict[str, float]:
        """Return the last metrics that are no curves of training, from before a resume or since."""
        kinds = ("val/", f"{PAIR_WEIGHTS}/")
        metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith(kinds)}
        return dict(sorted((self._metrics | metrics).items()))


def _statistics(rows: Tensor) -> dict[str, float | int | None]:
    _, u, _, weight, flipped = rows.unbind(1)
    weights = weight_gap(weight, flipped)
    return {
        "weight_mean_unflipped": weights["mean_unflipped"],
        "weight_mean_flipped": weights["mean_flipped"],
        "weight_gap": weights["gap"],
        "flip_auroc": weights["auroc"],
        "flip_auroc_u": weight_gap(u, flipped)["auroc"],
        "window_pairs": int((flipped != UNKNOWN).sum()),
    }


def _validated(trainer: Trainer) -> int | None:
    data, limit = datamodule(trainer), trainer.limit_val_batches
    if (pairs := getattr(data, "validation_pairs", None)) is None:
        return None
    if isinstance(limit, float) and limit == 1:  # an integer is a number of batches
        return len(pairs)
    size = getattr(data, "validation_batch_size", None)
    return size and min(len(pairs), sum(map(int, trainer.num_val_batches)) * size)


def _of_vnet(pl_module: Any) -> dict[str, int]:
    """Return the numbers of VNet's updates and skips, and say so if it has learned nothing."""
    weighting = getattr(pl_module, "weighting", None)
    if not isinstance(weighting, VNetWeighting):
        return {}
    if weighting.skipped and not weighting.updates:
        rank_zero_info(
            f"VNet learned nothing: its updates ({weighting.skipped}) were all skipped, so all weights are "
            "those of the start. One is skipped if no pair of its meta-batch is confident (try a lower tau), "
            "or if the learning rate is 0, as in a warm-up's first update (try a lower every)."
        )
    return {"vnet_updates": weighting.updates, "vnet_skipped": weighting.skipped}
