"""Writes a run's numbers down when it ends."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import lightning
import peft
import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing
from pacmr_lightning.runs.folder import SUMMARY
from pacmr_lightning.weight_gap import weight_gap

from .records import gathered, record_of, to_host

STEP, WEIGHT, U, FLIPPED = range(4)
"""Columns of the window's rows."""


class RunSummary(Callback):
    """Writes ``summary.json`` into the run's folder at the end of fit.

    Keys; null stands wherever a number is unknown or not finite:

    - ``method, task, noise_rate, seed, steps`` (policy updates), ``counts`` (the datamodule's), ``versions``;
    - ``val_accuracy, val_margin``, and ``metrics`` with every ``val/...`` metric that a module or a callback
      has logged last;
    - over the last ``window`` visits, on all ranks, of pairs whose flip is known (``window_pairs`` of them):
      ``weight_mean_unflipped, weight_mean_flipped``, their difference ``weight_gap``, and how well a low
      weight (``flip_auroc``) or a low u (``flip_auroc_u``) tells the flipped pairs. A score that is the same
      for all pairs ranks nothing: its AUROC is null;
    - ``seconds`` of training, data loading included, start-up and validation left out, and
      ``pairs_per_second`` over all ranks. Both go on counting after a resume.

    torchmetrics' ``Running`` windows over steps and not over pairs, hence the rows kept here.

    Args:
        window: pairs that the statistics look back on.

    Raises:
        UserError: ``window`` is under 1; or, at the first step, the module returns no record.
    """

    def __init__(self, window: int = 2000):
        super().__init__()
        if window < 1:
            raise UserError(f"window is {window}, but the summary needs at least 1 pair to look back on.")
        self.window = window
        self._reset()

    def _reset(self) -> None:
        self._seconds = 0.0
        self._mark = 0.0
        self._pairs = 0
        self._rows: deque[Tensor] = deque()
        self._metrics: dict[str, float] = {}
        self._statistics: dict[str, float | int | None] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets an earlier run; a checkpoint is loaded after this."""
        if stage != "fit":
            return
        self._statistics = None
        if trainer.global_step == 0:
            self._reset()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the state of all ranks; ``state_dict`` would save that of rank 0 alone."""
        checkpoint[type(self).__name__] = {
            "seconds": self._seconds,
            "pairs": self._all_pairs(trainer.strategy.root_device),
            "rows": self._all_rows(trainer.strategy.root_device),
            "metrics": self._val_metrics(trainer),
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Goes on from a checkpoint, with this number of ranks or another."""
        state = checkpoint.get(type(self).__name__)
        if state is None:
            return
        self._reset()
        self._seconds = state["seconds"]
        self._metrics = state["metrics"]
        # What counts is the union over the ranks, so rank 0 holds them, whoever visited them.
        if trainer.is_global_zero:
            self._pairs = state["pairs"]
            self._rows.append(state["rows"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock; the summary of what this fit goes on from is no longer one of the run."""
        if trainer.is_global_zero:
            (Path(trainer.default_root_dir) / SUMMARY).unlink(missing_ok=True)
        self._mark = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock again, so that the time since the last training step does not count."""
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes the step's pairs and its time."""
        record = record_of(outputs)
        columns = to_host(record)
        step = torch.full((len(record.ids),), trainer.global_step - 1)
        values = [step, *(torch.from_numpy(columns[name]) for name in ("weight", "u", "flipped"))]
        rows = torch.stack([value.double() for value in values], dim=1)
        known = rows[rows[:, FLIPPED] != UNKNOWN]
        if len(known):
            self._rows.append(known)
            while sum(map(len, self._rows)) - len(self._rows[0]) >= self.window:
                self._rows.popleft()
        self._pairs += len(record.ids)
        now = time.perf_counter()
        self._seconds += now - self._mark
        self._mark = now

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Computes the statistics, while the ranks can still talk to each other."""
        device = trainer.strategy.root_device
        self._statistics = self._totals(trainer.global_step, self._all_pairs(device), self._all_rows(device))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file, after every callback's ``on_train_end`` has added its metrics."""
        if not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / SUMMARY
        if self._statistics is None:
            # A fit that had nothing left to do never started to train. It leaves the summary that is there,
            # and writes it where the run was killed between its last checkpoint and this file.
            if path.exists() or not self._rows:
                return
            self._statistics = self._totals(trainer.global_step, self._pairs, torch.cat([*self._rows]))
        data = trainer.datamodule
        seed = os.environ.get("PL_GLOBAL_SEED")
        metrics = self._val_metrics(trainer)
        summary = {
            "method": pl_module.method,
            "task": None if data is None else data.task,
            "noise_rate": None if data is None else data.noise_rate,
            "seed": None if seed is None else int(seed),
            "val_accuracy": metrics.get("val/rewards/accuracies"),
            "val_margin": metrics.get("val/rewards/margins"),
            **self._statistics,
            "metrics": metrics,
            "counts": None if data is None else data.counts,
            "versions": {
                library.__name__: str(library.__version__)
                for library in (torch, lightning, transformers, peft)
            },
        }
        text = json.dumps(_without_nan(summary), indent=2, allow_nan=False)
        with replacing(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")

    def _val_metrics(self, trainer: Trainer) -> dict[str, float]:
        """The ``val/...`` metrics that were logged last, before a resume or since."""
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        known = self._metrics | {name: value for name, value in found.items() if name.startswith("val/")}
        return dict(sorted(known.items()))

    def _totals(self, steps: int, pairs: int, rows: Tensor) -> dict[str, float | int | None]:
        return {
            "steps": steps,
            **_statistics(rows),
            "seconds": self._seconds,
            "pairs_per_second": pairs / self._seconds if self._seconds else None,
        }

    def _all_rows(self, device: torch.device) -> Tensor:
        """(K, 4) the last rows of all ranks on the CPU, oldest first, at most ``window`` of them."""
        rows = torch.cat([torch.empty(0, 4, dtype=torch.double), *self._rows])
        rows = torch.cat(gathered(rows, device))
        return rows[rows[:, STEP].argsort(stable=True)][-self.window :].clone()

    def _all_pairs(self, device: torch.device) -> int:
        """Visits on all ranks since the first step."""
        return int(sum(gathered(torch.tensor(self._pairs), device)))


def _statistics(rows: Tensor) -> dict[str, float | int | None]:
    """What the weights and u of (K, 4) rows say of the flips."""
    weights = weight_gap(rows[:, WEIGHT], rows[:, FLIPPED])
    return {
        "weight_mean_unflipped": weights["mean_unflipped"],
        "weight_mean_flipped": weights["mean_flipped"],
        "weight_gap": weights["gap"],
        "flip_auroc": weights["auroc"],
        "flip_auroc_u": weight_gap(rows[:, U], rows[:, FLIPPED])["auroc"],
        "window_pairs": len(rows),
    }


def _without_nan(value: Any) -> Any:
    """The same JSON value with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
