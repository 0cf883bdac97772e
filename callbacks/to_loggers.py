"""Numbers, figures, histograms and texts for the loggers of a run; on rank 0 they are shown."""

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
"""Bins of a histogram where the logger does not choose them; TensorBoard does."""


def log_numbers(trainer: Trainer, values: dict[str, float]) -> None:
    """Log numbers where Lightning has no ``self.log``, in the row of the last update's metrics.

    They are in ``trainer.callback_metrics`` too, where ``RunSummary`` takes them from.
    """
    kept = {name: torch.tensor(value, dtype=torch.double) for name, value in values.items()}
    trainer.callback_metrics.update(kept)
    for logger in trainer.loggers:
        logger.log_metrics(values, step=_step(trainer))
        logger.save()


def publish(trainer: Trainer, figure: Figure, file: str, name: str) -> None:
    """Write ``analysis/FILE-step-NNNNN.png`` and .pdf, and show the figure in TensorBoard, W&B and MLflow.

    Args:
        trainer: of the run.
        figure: what is drawn.
        file: the files' name, without step and ending.
        name: as the loggers show it, with slashes for groups; MLflow's files are ``NAME-step-NNNNN.png``.
    """
    save_figure(figure, Path(trainer.default_root_dir) / ANALYSIS / _file(trainer, file))
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, _step(trainer))
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [figure], _step(trainer))
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{_file(trainer, name)}.png")


def log_histogram(trainer: Trainer, name: str, values: np.ndarray) -> None:
    """Show the distribution of (N,) finite values.

    MLflow, which has no histograms, gets ``NAME-step-NNNNN.json`` with ``edges`` and ``counts`` of its bins.
    """
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
    """Show texts: in TensorBoard each under its own name, in W&B one table, in MLflow one Markdown file.

    Args:
        trainer: of the run.
        name: as the loggers show it.
        texts: under an id its parts by their headings, the same ones for all ids.
    """
    pages = {
        key: "\n\n".join(
            # Code blocks, which are shown as they are.
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
    """Return the step of the last update's metrics; before the first update, that of the first."""
    return max(trainer.global_step - 1, 0)


def _file(trainer: Trainer, name: str) -> str:
    return f"{name}-step-{trainer.global_step:05d}"
