"""A CSV logger that continues its file when a run is resumed; Lightning's own deletes it."""

from __future__ import annotations

import csv
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from .run_folder import replacing


class ContinuedWriter(ExperimentWriter):
    """Keeps an earlier run's rows, up to the first step that this one logs."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._continues = Path(self.metrics_file_path).exists()

    def _check_log_dir_exists(self) -> None:
        """Overrides the deletion of an earlier run's file."""

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Records the metrics of a step; the first call drops rows that a killed run logged from here on."""
        if self._continues and step is not None:
            self._drop_rows_from(step)
        super().log_metrics(metrics_dict, step)

    def _drop_rows_from(self, step: int) -> None:
        self._continues = False
        path = Path(self.metrics_file_path)
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if row["step"] and int(row["step"]) < step]
        self.metrics_keys = list(reader.fieldnames or [])
        with replacing(path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)


class ContinuedCSVLogger(CSVLogger):
    """Lightning's CSVLogger over a ``ContinuedWriter``; hyperparameters are left to ``config.yaml``."""

    @property
    @rank_zero_experiment
    def experiment(self) -> ContinuedWriter:
        """The writer, made when first needed."""
        if self._experiment is None:
            self._experiment = ContinuedWriter(self.log_dir)
        return self._experiment

    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None) -> None:
        """Nothing: the run's folder has them in ``config.yaml``."""
