"""Numbers, figures, histograms and texts for a run's loggers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from pacmr_lightning.files import save_figure
from pacmr_lightning.runs.folder import ANALYSIS

if TYPE_CHECKING:  # drawing is imported when there is something to draw
    from matplotlib.figure import Figure

BINS = 30


def log_numbers(trainer: Trainer, values: dict[str, float]) -> None:
    """Log numbers at the step of the last update's metrics, and set ``trainer.callback_metrics``."""
    kept = {name: torch.tensor(value, dtype=torch.double) for name, value in values.items()}
    trainer.callback_metrics.update(kept)
    for logger in trainer.loggers:
        logger.log_metrics(values, step=_step(trainer))
        logger.save()


def publish(trainer: Trainer, figure: Figure, file: str, name: str) -> None:
    """Write ``analysis/FILE-step-NNNNN.png`` and .pdf, and show the figure as ``name`` in the loggers."""
    save_figure(figure, Path(trainer.default_root_dir) / ANALYSIS / _file(trainer, file))
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, _step(trainer))
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [figure], _step(trainer))
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{_file(trainer, name)}.png")


def log_histogram(trainer: Trainer, name: str, values: np.ndarray) -> None:
    """Show the histogram of (N,) finite values; in MLflow as JSON with ``edges`` and ``counts``."""
    counts, edges = (column.tolist() for column in np.histogram(values, bins=BINS))
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, values, _step(trainer))
        elif isinstance(logger, WandbLogger):
            import wandb

            histogram: dict[str, Any] = {name: wandb.Histogram(np_histogram=(counts, edges))}
            logger.log_metrics(histogram, _step(trainer))
        elif isinstance(logger, MLFlowLogger):
            bins = {"edges": edges, "counts": counts}
            logger.experiment.log_dict(logger.run_id, bins, f"{_file(trainer, name)}.json")


def log_texts(trainer: Trainer, name: str, texts: dict[str, dict[str, str]]) -> None:
    """Show texts (id to heading to part): as texts in TensorBoard, a table in W&B, Markdown in MLflow."""
    pages = {
        key: "\n\n".join(
            # Code blocks, which loggers show unchanged.
            f"**{heading}**\n\n" + "\n".join(f"    {line}" for line in text.splitlines() or [""])
            for heading, text in parts.items()
        )
        for key, parts in texts.items()
    }
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            for key, page in pages.items():
                logger.experiment.add_text(f"{name}/{key}", page, _step(trainer))
        elif isinstance(logger, WandbLogger):
            headings = list(next(iter(texts.values())))
            rows = [[key, *parts.values()] for key, parts in texts.items()]
            logger.log_text(name, ["id", *headings], rows, step=_step(trainer))
        elif isinstance(logger, MLFlowLogger):
            text = "\n\n".join(f"# {key}\n\n{page}" for key, page in pages.items())
            logger.experiment.log_text(logger.run_id, text, f"{_file(trainer, name)}.md")


def _step(trainer: Trainer) -> int:
    """Return the step of the last update's metrics, 0 before the first update."""
    return max(trainer.global_step - 1, 0)


def _file(trainer: Trainer, name: str) -> str:
    return f"{name}-step-{trainer.global_step:05d}"
