"""Figures, histograms and texts, for those of a run's loggers that can show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

if TYPE_CHECKING:  # drawing is imported when there is something to draw
    from matplotlib.figure import Figure


def log_figure(trainer: Trainer, name: str, figure: Figure) -> None:
    """Shows a figure in TensorBoard, W&B and MLflow; other loggers go without. On rank 0 only.

    It belongs to the policy update that has just been done, as the metrics of that update. MLflow's files
    have the number of updates done in their names, as those of the run's folder: ``NAME-step-NNNNN.png``.

    Args:
        trainer: of the run.
        name: as the loggers show it, with slashes for groups.
        figure: what is drawn.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, _step(trainer))
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [figure], _step(trainer))
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{_file(trainer, name)}.png")


def log_histogram(trainer: Trainer, name: str, values: np.ndarray) -> None:
    """Shows how values are distributed, as ``log_figure`` shows a figure.

    MLflow, which has no histograms, gets ``NAME-step-NNNNN.json`` with ``edges`` and ``counts`` of its bins.

    Args:
        trainer: of the run.
        name: as the loggers show it.
        values: (N,) finite numbers.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, values, _step(trainer))
        elif isinstance(logger, (WandbLogger, MLFlowLogger)):
            counts, edges = np.histogram(values, bins=BINS)
            if isinstance(logger, WandbLogger):
                import wandb

                histogram = wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))
                metrics: dict[str, Any] = {name: histogram}
                logger.log_metrics(metrics, _step(trainer))
            else:
                bins = {"edges": edges.tolist(), "counts": counts.tolist()}
                logger.experiment.log_dict(logger.run_id, bins, f"{_file(trainer, name)}.json")


def log_texts(trainer: Trainer, name: str, texts: dict[str, dict[str, str]]) -> None:
    """Shows texts, as ``log_figure`` shows a figure.

    TensorBoard shows each under its own name, as Markdown; W&B gets one table of all, MLflow one Markdown
    file.

    Args:
        trainer: of the run.
        name: as the loggers show it.
        texts: under an id its parts by their headings, the same ones for all ids.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            for key, parts in texts.items():
                logger.experiment.add_text(f"{name}/{key}", _markdown(parts), _step(trainer))
        elif isinstance(logger, WandbLogger):
            headings = list(next(iter(texts.values())))
            rows = [[key, *parts.values()] for key, parts in texts.items()]
            logger.log_text(name, ["id", *headings], rows, step=_step(trainer))
        elif isinstance(logger, MLFlowLogger):
            page = "\n\n".join(f"# {key}\n\n{_markdown(parts)}" for key, parts in texts.items())
            logger.experiment.log_text(logger.run_id, page, f"{_file(trainer, name)}.md")


BINS = 30
"""Of a histogram where the logger does not choose them; TensorBoard does."""


def _step(trainer: Trainer) -> int:
    """That of the metrics of the update that has just been done; before the first one, that of the first."""
    return max(trainer.global_step - 1, 0)


def _file(trainer: Trainer, name: str) -> str:
    return f"{name}-step-{trainer.global_step:05d}"


def _markdown(parts: dict[str, str]) -> str:
    """The texts as code blocks, which are shown as they are."""
    return "\n\n".join(
        f"**{heading}**\n\n" + "\n".join(f"    {line}" for line in text.splitlines() or [""])
        for heading, text in parts.items()
    )
