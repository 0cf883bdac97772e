"""Loggers of a run: a CSV file that a resumed run continues, and the user's."""

from __future__ import annotations

import csv
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from ..files import replacing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class ContinuedWriter(ExperimentWriter):
    """CSV writer that keeps an earlier run's rows before its own first step, and writes atomically."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._first_step: float | None = None

    def _check_log_dir_exists(self) -> None:
        """Skip the deletion of an earlier run's file."""

    def save(self) -> None:
        """Append the new rows, without those of a killed run."""
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
    """Lightning's CSVLogger with a ``ContinuedWriter`` and without hyperparameters."""

    _experiment: ContinuedWriter | None

    @property
    @rank_zero_experiment
    def experiment(self) -> ContinuedWriter:
        """The writer, made when first needed."""
        if self._experiment is None:
            self._experiment = ContinuedWriter(self.log_dir)
        return self._experiment

    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None) -> None:
        """Do nothing: ``config.yaml`` has them."""


class RunBoard(TensorBoardLogger):
    """Lightning's TensorBoardLogger whose event files lie in the run's folder itself.

    TensorBoard names a run by the folder of its event files, so ``runs/mine`` is ``mine``. The
    hyperparameters stay in ``tensorboard/hparams.yaml``.

    Args:
        folder: the run's.
        first_step: updates done before this fit; later points of a killed run are hidden.
    """

    def __init__(self, folder: str, first_step: int):
        super().__init__(folder, "tensorboard", "", default_hp_metric=False)
        self._first_step = first_step

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The writer, made when first needed."""
        if self._experiment is None:
            # Imported late: it is slow.
            from torch.utils.tensorboard import SummaryWriter

            Path(self.log_dir).mkdir(parents=True, exist_ok=True)
            self._experiment = SummaryWriter(self.save_dir, purge_step=self._first_step)
        return self._experiment


def loggers_of_another(asked: Any, suffix: str) -> Any:
    """Return the configuration ``trainer.logger`` of a second pass, as a new run of W&B and MLflow."""
    if isinstance(asked, list):
        return [loggers_of_another(one, suffix) for one in asked]
    if not isinstance(asked, dict):
        return asked
    options = dict(asked.get("init_args") or {})
    kind = asked["class_path"].rpartition(".")[2]
    for name in ("id", "version") if kind == "WandbLogger" else ():
        if options.get(name):
            options[name] = f"{options[name]}-{suffix}"
    if kind == "MLFlowLogger":
        options["run_id"] = None
    return asked | {"init_args": options}


@contextmanager
def wandb_ends() -> Iterator[None]:
    """End W&B's run with ours: a process has only one, which the next fit would continue."""
    failed = True
    try:
        yield
        failed = False
    except SystemExit as end:
        failed = bool(end.code)
        raise
    finally:
        if run := getattr(sys.modules.get("wandb"), "run", None):
            run.finish(exit_code=int(failed))
