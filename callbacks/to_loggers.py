"""Numbers, figures, histograms and texts for a run's loggers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary

from pacmr_lightning.numerics import histogram
from pacmr_lightning.runs.folder import ANALYSIS

BINS = 30
PAIR_WEIGHTS = "pair_weights"
"""Group of names of weights of the last visited pairs."""


def log_numbers(trainer: Trainer, values: dict[str, float]) -> None:
    """Log numbers at the step of the last update's metrics, and set ``trainer.callback_metrics``."""
    kept = {name: torch.tensor(value, dtype=torch.double) for name, value in values.items()}
    trainer.callback_metrics.update(kept)
    for logger in trainer.loggers:
        logger.log_metrics(values, step=_step(trainer))
        logger.save()


def log_image(
    trainer: Trainer, name: str, image: np.ndarray, loggers: Sequence[Logger] | None = None
) -> None:
    """Show a (height, width, 3) uint8 image; in MLflow as the artifact ``NAME-step-NNNNN.png``."""
    picture = Image.fromarray(image)
    for logger in trainer.loggers if loggers is None else loggers:
        if isinstance(logger, TensorBoardLogger):
            content = io.BytesIO()
            # Not add_image, which takes longer. TensorBoard's checksums take longest, so the file is small.
            picture.quantize(256, Image.Quantize.FASTOCTREE).save(content, "png", compress_level=1)
            value = Summary.Value(tag=name)
            value.image.height, value.image.width, value.image.colorspace = image.shape
            value.image.encoded_image_string = content.getvalue()
            logger.experiment.file_writer.add_summary(Summary(value=[value]), _step(trainer))
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [picture], _step(trainer))
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_image(logger.run_id, picture, f"{_file(trainer, name)}.png")


def log_precision_recall(
    trainer: Trainer,
    name: str,
    labels: np.ndarray,
    scores: dict[str, np.ndarray],
    draw: Callable[[np.ndarray, dict[str, np.ndarray]], np.ndarray],
) -> None:
    """Show how well (N,) ``scores`` in [0, 1] detect the ``labels`` that are true.

    TensorBoard gets ``NAME/SCORE`` of each as PR curves, other loggers the image ``NAME`` of ``draw``.
    """
    others = []
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            for score, values in scores.items():
                logger.experiment.add_pr_curve(f"{name}/{score}", labels, values, _step(trainer))
        elif isinstance(logger, (WandbLogger, MLFlowLogger)):
            others.append(logger)
    if others:
        log_image(trainer, name, draw(labels, scores), others)


def log_histogram(trainer: Trainer, name: str, values: np.ndarray) -> None:
    """Show the histogram of (N,) finite values; in MLflow as JSON with ``edges`` and ``counts``."""
    counts, edges = (column.tolist() for column in histogram(values, BINS))
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            # Not add_histogram, which counts in 1,500 bins that TensorBoard shows as 30.
            sums = (len(values), float(values.sum(dtype=float)), float((values.astype(float) ** 2).sum()))
            first, last = float(values.min()), float(values.max())
            logger.experiment.add_histogram_raw(name, first, last, *sums, edges[1:], counts, _step(trainer))
        elif isinstance(logger, WandbLogger):
            import wandb

            shown: dict[str, Any] = {name: wandb.Histogram(np_histogram=(counts, edges))}
            logger.log_metrics(shown, _step(trainer))
        elif isinstance(logger, MLFlowLogger):
            bins = {"edges": edges, "counts": counts}
            logger.experiment.log_dict(logger.run_id, bins, f"{_file(trainer, name)}.json")


def log_texts(trainer: Trainer, name: str, texts: dict[str, dict[str, str]]) -> None:
    """Show texts (row to heading to text) as one table; in MLflow as the artifact ``NAME-step-NNNNN.md``."""
    headings = list(next(iter(texts.values())))
    rows = [[key, *parts.values()] for key, parts in texts.items()]
    cells = [[verbatim(cell) for cell in row] for row in rows]
    lines = [["", *headings], ["---"] * (1 + len(headings)), *cells]
    page = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, page, _step(trainer))
        elif isinstance(logger, WandbLogger):
            logger.log_text(name, ["id", *headings], rows, step=_step(trainer))
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_text(logger.run_id, f"{page}\n", f"{_file(trainer, name)}.md")


def verbatim(text: str) -> str:
    """Return Markdown of a table's cell that shows a text as it is."""
    marks = re.sub(r"[^\w\s.,;:?'\"()/+=-]|_", lambda found: f"&#{ord(found[0])};", text)
    return "<br>".join(marks.splitlines())


def analysis_file(trainer: Trainer, name: str) -> Path:
    """Return RUN/analysis/NAME-step-NNNNN, without an ending."""
    return Path(trainer.default_root_dir) / ANALYSIS / _file(trainer, name)


def _step(trainer: Trainer) -> int:
    return max(trainer.global_step - 1, 0)


def _file(trainer: Trainer, name: str) -> str:
    return f"{name}-step-{trainer.global_step:05d}"
