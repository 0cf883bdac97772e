"""A CSV logger that continues its file when a run is resumed; Lightning's own deletes it."""

from __future__ import annotations

import csv
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from ..files import replacing


class ContinuedWriter(ExperimentWriter):
    """Keeps an earlier run's rows, up to the first step that this one logs, and never half a file."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._first_step: float | None = None

    def _check_log_dir_exists(self) -> None:
        """Overrides the deletion of an earlier run's file."""

    def save(self) -> None:
        """Writes the new rows behind those that are there, without those of a killed run."""
        if not self.metrics:
            return
        path = Path(self.metrics_file_path)
        rows: list[dict[str, Any]] = []
        if path.exists():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                rows = list(reader)
                self.metrics_keys = list(reader.fieldnames or [])
        if self._first_step is None:
            self._first_step = self.metrics[0]["step"]
            rows = [row for row in rows if row["step"] and int(row["step"]) < self._first_step]
        self._record_new_keys()
        with replacing(path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows([*rows, *self.metrics])
        self.metrics = []


class ContinuedCSVLogger(CSVLogger):
    """Lightning's CSVLogger over a ``ContinuedWriter``; hyperparameters are left to ``config.yaml``."""

    _experiment: ContinuedWriter | None

    @property
    @rank_zero_experiment
    def experiment(self) -> ContinuedWriter:
        """The writer, made when first needed."""
        if self._experiment is None:
            self._experiment = ContinuedWriter(self.log_dir)
        return self._experiment

    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None) -> None:
        """Nothing: the run's folder has them in ``config.yaml``."""
