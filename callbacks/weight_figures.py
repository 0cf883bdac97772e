"""Callbacks that draw the last visits: VNet's surfaces, and distributions of weights."""

import math
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info
from scipy.special import expit
from torch import Tensor

from pacmr_lightning.analysis.surface import Surface, density, grid, save_surface, slope_and_offset
from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import UserError, check_at_least
from pacmr_lightning.files import save_figure
from pacmr_lightning.modules.metrics import PAIR_WEIGHTS, last_update, name_with_step
from pacmr_lightning.modules.schedule import datamodule
from pacmr_lightning.rewards import Visits
from pacmr_lightning.runs.folder import ANALYSIS
from pacmr_lightning.weighting import VNet

from .recurring import VisitsCallback

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class VisitFigures(VisitsCallback):
    """Base of callbacks that draw the last visits: regularly for loggers, at chosen updates into files.

    Args:
        steps: policy updates after which figures are written to RUN/analysis, besides the end of the fit.
        window: number of last visits over all ranks, in whole steps; see ``VisitsCallback``.
        every: updates between two figures for the loggers, or a share of the run; see ``Recurring``. None for
            ``steps`` and the end only.

    Raises:
        UserError: an option is out of range, or the module returns no record.
    """

    files: tuple[str, ...]
    """Names of its files in RUN/analysis, without ``-step-NNNNN`` and extension."""

    def __init__(self, steps: list[int] | None = None, window: int = 2000, every: int | float | None = 0.25):
        super().__init__(window, every)
        if steps and min(steps) < 1:
            raise UserError(f"steps is {list(steps)}, but policy updates count from 1.")
        self.steps = frozenset(steps or ())
        self._written: int | None = None
        """Updates done when files were last written."""

    @abstractmethod
    def draw(self, trainer: Trainer, pl_module: Any, visits: Visits, to_files: bool) -> None:
        """Draw N finite ``visits`` on rank 0, for loggers or files."""

    def is_due(self, trainer: Trainer) -> bool:
        """Return true regularly, and after the chosen steps."""
        return super().is_due(trainer) or trainer.global_step in self.steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the files of the steps that this fit will do."""
        self._written = None
        if not trainer.is_global_zero:
            return
        for name in self.files:
            for path in (Path(trainer.default_root_dir) / ANALYSIS).glob(f"{name}-step-*.*"):
                step = path.stem.removeprefix(f"{name}-step-")
                if step.isdecimal() and int(step) > trainer.global_step:
                    path.unlink()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the files, unless that is done: a fit may end early."""
        if self._written != trainer.global_step:
            self._written = trainer.global_step
            self.look(trainer, pl_module)

    def process(self, trainer: Trainer, pl_module: Any, rows: Tensor) -> None:
        """Draw the visits with finite values."""
        step = trainer.global_step
        # Known at the last update, where on_train_end would draw everything again.
        if step in self.steps or step >= trainer.estimated_stepping_batches:
            self._written = step
        rows = rows[rows.isfinite().all(dim=1)]
        to_files = self._written == step
        if len(rows) and trainer.is_global_zero and (trainer.loggers or to_files):
            _, u, delta, weight, flipped = rows.unbind(1)
            visits = Visits(u.numpy(), delta.numpy(), weight.numpy(), flipped.numpy().astype(np.int8))
            self.draw(trainer, pl_module, visits, to_files)

    def put(self, trainer: Trainer, tag: str, file: str | None, figure: "Figure") -> None:
        """Log a figure under ``pair_weights/TAG``; also write it as RUN/analysis/FILE-step-NNNNN."""
        if file is not None:
            save_figure(figure, Path(trainer.default_root_dir) / ANALYSIS / name_with_step(trainer, file))
        log_figure(trainer, f"{PAIR_WEIGHTS}/{tag}", figure)


class VNetSurfaces(VisitFigures):
    """VNet's a(z), b(z) and g(z) over the Delta and u of the last visits.

    Other weightings have none. On rank 0:

    - Tags, regularly and at the end: the images ``pair_weights/heat_maps`` (a, b and g with contours of the
      visits) and ``weight_function`` (g along u at the median of Delta). With the files: the image
      ``surfaces`` (3-D).
    - Files, after ``steps`` and at the end: ``analysis/surfaces-step-NNNNN`` (.png and .pdf in 3-D, .csv, and
      .npz for the figures of ``pacmr sweep``) and ``analysis/heat-maps-step-NNNNN`` (.png and .pdf).
    - Cost: 0.2 ms per update, about 0.6 s for the images, and 1.5 s for the files.

    Args:
        steps: policy updates after which files are written, besides the end.
        points: of the grid along either axis, at least 2.
        options: ``window`` and ``every`` of ``VisitFigures``.
    """

    files = ("surfaces", "heat-maps")

    def __init__(self, steps: list[int] | None = None, points: int = 61, **options: Any):
        super().__init__(steps, **options)
        check_at_least(2, points=points)
        self.points = points

    def draw(self, trainer: Trainer, pl_module: Any, visits: Visits, to_files: bool) -> None:
        """Draw and save the surfaces."""
        if not isinstance(pl_module.vnet, VNet):
            return
        surface = self._surface(trainer, pl_module, visits)
        from pacmr_lightning.analysis import figures  # imported late: matplotlib is slow

        if to_files:
            save_surface(surface, trainer.default_root_dir)
            self.put(trainer, "surfaces", "surfaces", figures.draw_surfaces(surface))
        self.put(trainer, "heat_maps", "heat-maps" if to_files else None, figures.draw_heat_maps(surface))
        start = pl_module.weighting.start_slope, pl_module.weighting.start_offset
        self.put(trainer, "weight_function", None, figures.draw_weight_function(surface, start))

    def _surface(self, trainer: Trainer, pl_module: Any, visits: Visits) -> Surface:
        delta, u = grid(visits, self.points)
        slope, offset = slope_and_offset(pl_module.vnet, delta, u)
        data = datamodule(trainer)
        return Surface(
            step=trainer.global_step,
            method=pl_module.method,
            task=data.task,
            noise_rate=math.nan if data.noise_rate is None else data.noise_rate,
            delta=delta,
            u=u,
            a=slope,
            b=offset,
            density=density(visits, delta, u),
            visits=visits,
            floor=pl_module.vnet.floor,
        )


class WeightDistributions(VisitFigures):
    """Distributions of the last visits' weights by label, and their precision and recall for known flips.

    On rank 0:

    - Tags, regularly and at the end: the image ``pair_weights/distributions``, unless weights are constant;
      the histograms ``g``, ``u`` and ``delta`` of ``pair_weights/unflipped/...`` and
      ``pair_weights/flipped/...`` (``all`` or ``unknown`` if flips are unknown); and the image ``flips``,
      precision and recall of low weight and low u.
    - Files, after ``steps`` and at the end: ``analysis/weight-distributions-step-NNNNN`` (.png and .pdf).
    - Cost: 0.1 ms per update, about 0.2 s for the images, and 0.4 s for the files.
    """

    files = ("weight-distributions",)

    def draw(self, trainer: Trainer, pl_module: Any, visits: Visits, to_files: bool) -> None:
        """Log the histograms and the precision-recall curves; draw the distributions."""
        from pacmr_lightning.analysis import figures  # imported late: matplotlib is slow

        differ = visits.weight.min() < visits.weight.max()
        columns = {"u": visits.u, "delta": visits.delta} | ({"g": visits.weight} if differ else {})
        for column, values in columns.items():
            for name, group in visits.by_flip(values).items():
                log_histogram(trainer, f"{PAIR_WEIGHTS}/{name}/{column}", group)
        known = visits.flipped != UNKNOWN
        flipped = visits.flipped[known] == 1
        if flipped.any() and not flipped.all():
            scores = {"low_u": expit(-visits.u[known].astype(float))}
            scores |= {"low_weight": 1 - visits.weight[known]} if differ else {}
            log_figure(trainer, "flips", figures.draw_precision_recall(flipped, scores))
        if differ:
            figure = figures.draw_weight_distributions(visits, trainer.global_step)
            self.put(trainer, "distributions", self.files[0] if to_files else None, figure)
        elif to_files and visits.weight[0] != 1:  # users expect no figure of unweighted pairs
            rank_zero_info(
                f"WeightDistributions draws nothing at step {trainer.global_step}: all weights are "
                f"{visits.weight[0]:g}."
            )


def log_figure(trainer: Trainer, name: str, figure: "Figure") -> None:
    """Log a figure; in MLflow as the artifact ``NAME-step-NNNNN.png``."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, last_update(trainer))
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [figure], last_update(trainer))
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{name_with_step(trainer, name)}.png")


def log_histogram(trainer: Trainer, name: str, values: np.ndarray) -> None:
    """Log a histogram of (N,) finite fp32 values; in MLflow as JSON with ``edges`` and ``counts``."""
    values = values.astype(float)  # between two neighbours of fp32 np.histogram finds too few numbers
    counts, edges = (column.tolist() for column in np.histogram(values, bins=30))
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, values, last_update(trainer), bins=edges)
        elif isinstance(logger, WandbLogger):
            import wandb

            shown: dict[str, Any] = {name: wandb.Histogram(np_histogram=(counts, edges))}
            logger.log_metrics(shown, last_update(trainer))
        elif isinstance(logger, MLFlowLogger):
            bins = {"edges": edges, "counts": counts}
            logger.experiment.log_dict(logger.run_id, bins, f"{name_with_step(trainer, name)}.json")
