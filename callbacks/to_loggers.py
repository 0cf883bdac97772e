"""Figures, histograms and texts for TensorBoard, W&B and MLflow."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure

from pacmr_lightning.modules.metrics import last_update
from pacmr_lightning.runs.folder import ANALYSIS

BINS = 30
PAIR_WEIGHTS = "pair_weights"
"""Group of names for weights of the last visits."""


def log_figure(trainer: Trainer, name: str, figure: Figure) -> None:
    """Log a figure; in MLflow as the artifact ``NAME-step-NNNNN.png``."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, last_update(trainer))
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [figure], last_update(trainer))
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{_file(trainer, name)}.png")


def log_histogram(trainer: Trainer, name: str, values: np.ndarray) -> None:
    """Log a histogram of (N,) finite fp32 values; in MLflow as JSON with ``edges`` and ``counts``."""
    values = values.astype(float)  # between two neighbours of fp32 np.histogram finds too few numbers
    counts, edges = (column.tolist() for column in np.histogram(values, BINS))
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, values, last_update(trainer), bins=edges)
        elif isinstance(logger, WandbLogger):
            import wandb

            shown: dict[str, Any] = {name: wandb.Histogram(np_histogram=(counts, edges))}
            logger.log_metrics(shown, last_update(trainer))
        elif isinstance(logger, MLFlowLogger):
            bins = {"edges": edges, "counts": counts}
            logger.experiment.log_dict(logger.run_id, bins, f"{_file(trainer, name)}.json")


def log_texts(trainer: Trainer, name: str, texts: dict[str, dict[str, str]]) -> None:
    """Log texts (by row and heading) as one table; in MLflow as the artifact ``NAME-step-NNNNN.md``."""
    headings = list(next(iter(texts.values())))
    rows = [[key, *parts.values()] for key, parts in texts.items()]
    cells = [[verbatim(cell) for cell in row] for row in rows]
    lines = [["", *headings], ["---"] * (1 + len(headings)), *cells]
    page = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, page, last_update(trainer))
        elif isinstance(logger, WandbLogger):
            logger.log_text(name, ["id", *headings], rows, step=last_update(trainer))
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_text(logger.run_id, f"{page}\n", f"{_file(trainer, name)}.md")


def verbatim(text: str) -> str:
    """Return Markdown that shows a text as it is in a table's cell."""
    marks = re.sub(r"[^\w\s.,;:?'\"()/+=-]|_", lambda match: f"&#{ord(match[0])};", text)
    return "<br>".join(marks.splitlines())


def analysis_file(trainer: Trainer, name: str) -> Path:
    """Return the path RUN/analysis/NAME-step-NNNNN, without an extension."""
    return Path(trainer.default_root_dir) / ANALYSIS / _file(trainer, name)


def _file(trainer: Trainer, name: str) -> str:
    return f"{name}-step-{trainer.global_step:05d}"
