"""Callbacks that draw the last visits: VNet's surfaces, and distributions of weights."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from scipy.special import expit
from torch import Tensor

from pacmr_lightning.analysis.surface import Surface, Visits, density, grid, save_surface, slope_and_offset
from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import UserError, check_at_least
from pacmr_lightning.files import save_figure
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.rewards import PairRecord
from pacmr_lightning.runs.folder import ANALYSIS
from pacmr_lightning.weighting.features import PAPER, Feature

from .to_loggers import (
    PAIR_WEIGHTS,
    analysis_file,
    log_histogram,
    log_image,
    log_numbers,
    log_precision_recall,
)
from .visits import VisitsCallback

CARD_POINTS = 41
"""Grid points of a picture along either axis."""


class VisitFigures(VisitsCallback):
    """Base of callbacks that log pictures of the last visits regularly, and write figures at chosen updates.

    Args:
        steps: policy updates after which figures are written to RUN/analysis, besides the end of the fit.
        window: number of last visits over all ranks, in whole steps; see ``LastVisits``.
        every: updates between two pictures for the loggers, or a share of the run, of which it may skip some;
            see ``Interval``. None for ``steps`` and the end only.

    Raises:
        UserError: an option is out of range, or the module returns no record.
    """

    files: tuple[str, ...]
    """Names of its files in RUN/analysis, without ``-step-NNNNN`` and extension."""

    def __init__(self, steps: list[int] | None = None, window: int = 2000, every: int | float | None = 0.1):
        super().__init__(window, 6, every, limited=True)
        if steps and min(steps) < 1:
            raise UserError(f"steps is {list(steps)}, but policy updates count from 1.")
        self.steps = frozenset(steps or ())
        self._names: tuple[str, ...] = ()
        self._ends = False
        self._shown: int | None = None

    @abstractmethod
    def show(self, trainer: Trainer, pl_module: Any, visits: Visits, a: Tensor, b: Tensor) -> None:
        """Log pictures of N finite ``visits`` on rank 0; (N,) ``a`` and ``b`` are NaN if undefined."""

    @abstractmethod
    def draw(self, trainer: Trainer, pl_module: Any, visits: Visits, a: Tensor, b: Tensor) -> None:
        """Write figures of the visits, with the arguments of ``show``, on rank 0."""

    def is_due(self, trainer: Trainer) -> bool:
        """Return true regularly, and after the chosen steps."""
        return super().is_due(trainer) or trainer.global_step in self.steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the columns of VNet's features."""
        super().setup(trainer, pl_module, stage)
        # Features other than Delta and u have columns of their own.
        names = tuple(getattr(getattr(pl_module, "vnet", None), "features", PAPER))
        self._names = () if names == PAPER else names
        self._ends, self._shown = False, None
        self._visits.columns = 6 + len(self._names)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the files of the steps that this fit will do."""
        if not trainer.is_global_zero:
            return
        for name in self.files:
            for path in (Path(trainer.default_root_dir) / ANALYSIS).glob(f"{name}-step-*.*"):
                step = path.stem.removeprefix(f"{name}-step-")
                if step.isdecimal() and int(step) > trainer.global_step:
                    path.unlink()

    def columns_of(self, record: PairRecord) -> Sequence[Tensor]:
        """Return u, Delta, weight, flipped, a, b and the features."""
        unknown = torch.full_like(record.u, torch.nan)
        a, b = (unknown if column is None else column for column in (record.a, record.b))
        features = () if record.features is None else record.features.unbind(1)
        return record.u, record.delta, record.weight, record.flipped, a, b, *features

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write figures at the end, and log pictures if they are not logged yet."""
        if trainer.global_step not in self.steps or self.interval.last != trainer.global_step:
            self._ends = True
            self._look(trainer, pl_module)

    def look(self, trainer: Trainer, pl_module: Any, rows: Tensor) -> None:
        """Log and draw the visits with finite values; a and b may be NaN."""
        shows, draws = self._shown != (step := trainer.global_step), self._ends or step in self.steps
        self._shown = step
        rows = rows[torch.cat([rows[:, 1:5], rows[:, 7:]], dim=1).isfinite().all(dim=1)]
        if len(rows) and trainer.is_global_zero:
            _, u, delta, weight, flipped, a, b, *features = rows.unbind(1)
            visits = Visits(u.numpy(), delta.numpy(), weight.numpy(), flipped.numpy().astype(np.int8))
            visits.features = {n: column.numpy() for n, column in zip(self._names, features, strict=True)}
            for wanted, method in ((shows, self.show), (draws, self.draw)):
                if wanted:
                    method(trainer, pl_module, visits, a, b)


class VNetSurfaces(VisitFigures):
    """VNet's a(z), b(z) and g(z) over the Delta and u of the last visits, as pictures and figures.

    Weightings without slope and offset have none. For a VNet with other features only g is drawn, over two of
    them, with the others at their medians. On rank 0:

    - Tags, regularly and at the end: the images ``pair_weights/g``, ``slope`` and ``offset`` (heat maps with
      contours of the visits) and ``weight_function`` (g along u at the median of Delta). Axes are fixed over
      a run: a range is eight times the first picture's values, and doubles if 1% of the pairs leave it. With
      the figures: ``pair_weights/monotone_share``, the share of the grid on which g rises with u, and
      ``monotone_share_data``, the same of the cells that contain a pair.
    - Files, after ``steps`` and at the end: ``analysis/surfaces-step-NNNNN`` (.png and .pdf in 3-D, .csv, and
      .npz for ``pacmr compare --output``) and ``analysis/heat-maps-step-NNNNN`` (.png and .pdf).
    - Cost: 0.2 ms per update, about 0.04 s for the pictures (0.2 s the first time), and 1 s for the figures.

    Args:
        steps: policy updates after which figures are written, besides the end.
        points: of the figures' grid along either axis, at least 2.
        window: number of last visits that the grid covers, over all ranks, in whole steps; see
            ``LastVisits``.
        features: two of VNet's features, for the axes; Delta always comes before u. None for these two if
            VNet has them, else for its first two.
        every: updates between two pictures for the loggers, or a share of the run, of which it may skip some;
            see ``Interval``. None for ``steps`` and the end only.

    Raises:
        UserError: an option is out of range, the module returns no record, or the weighting cannot be drawn.
    """

    files = ("surfaces", "heat-maps")

    def __init__(
        self,
        steps: list[int] | None = None,
        points: int = 61,
        window: int = 2000,
        features: tuple[Feature, Feature] | None = None,
        every: int | float | None = 0.1,
    ):
        super().__init__(steps, window, every)
        check_at_least(2, points=points)
        self.points = points
        self.features = PAPER if features and set(features) == set(PAPER) else features
        self._ranges: dict[str, tuple[float, float]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that VNet has the features."""
        super().setup(trainer, pl_module, stage)
        known = self._names or PAPER
        if len(known) < 2 and stage == "fit":
            rank_zero_info(f"VNetSurfaces draws nothing: it needs two features, VNet has {known[0]} only.")
        if self.features and not (set(self.features) <= set(known) and len(set(self.features)) == 2):
            raise UserError(
                f"features is {' and '.join(self.features)}, but VNetSurfaces needs two different features "
                f"of VNet, which has {', '.join(known)}."
            )

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the axes' ranges."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint[type(self).__name__]["ranges"] = self._ranges

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the visits and the axes' ranges."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if state := checkpoint.get(type(self).__name__):
            self._ranges = dict(state["ranges"])

    def show(self, trainer: Trainer, pl_module: Any, visits: Visits, a: Tensor, b: Tensor) -> None:
        """Log heat maps and the weight function."""
        if not trainer.loggers or (axes := self._axes(a)) is None:
            return
        # Imported late: matplotlib is slow.
        from pacmr_lightning.analysis.cards import draw_map, draw_weight_function, widened

        shown = self._on_axes(visits, axes)
        weighting = getattr(pl_module, "weighting", None)
        start: Any = getattr(weighting, "start_slope", None), getattr(weighting, "start_offset", None)
        values = {axes[0]: shown.delta, axes[1]: shown.u}
        for name in axes:
            center = 0.0 if name in PAPER else float(np.median(values[name]))
            self._ranges[name] = widened(self._ranges.get(name), values[name], center)
        delta, u = (np.linspace(*self._ranges[name], CARD_POINTS) for name in axes)
        surface = self._surface(trainer, pl_module, visits, a, b, axes, (delta, u))
        names = {"g": "g"}
        if axes == PAPER:
            names |= {"a": "slope", "b": "offset"}
            for name, column, center in zip("ab", (a, b), (start[0] or 1.0, start[1] or 0.0), strict=True):
                self._ranges[name] = widened(self._ranges.get(name), column.numpy(), center, least=0.5)
        for name, tag in names.items():
            scale = (0.0, 1.0) if name == "g" else self._ranges[name]
            log_image(trainer, f"{PAIR_WEIGHTS}/{tag}", draw_map(surface, name, scale))
        known = axes == PAPER and None not in start
        function = draw_weight_function(surface, start if known else None)
        log_image(trainer, f"{PAIR_WEIGHTS}/weight_function", function)

    def draw(self, trainer: Trainer, pl_module: Any, visits: Visits, a: Tensor, b: Tensor) -> None:
        """Draw and save the surfaces."""
        if (axes := self._axes(a)) is None:
            return
        points = grid(self._on_axes(visits, axes), self.points, axes)
        surface = self._surface(trainer, pl_module, visits, a, b, axes, points)
        save_surface(surface, trainer.default_root_dir)
        shares = {"monotone_share": surface.monotone_share()}
        shares["monotone_share_data"] = surface.monotone_share(with_data=True)
        log_numbers(trainer, {f"{PAIR_WEIGHTS}/{name}": share for name, share in shares.items()})
        # Imported late: matplotlib is slow.
        from pacmr_lightning.analysis.surface_figure import draw_heat_maps, draw_surfaces

        for file, figure in zip(self.files, (draw_surfaces(surface), draw_heat_maps(surface)), strict=True):
            save_figure(figure, analysis_file(trainer, file))

    def _axes(self, a: Tensor) -> tuple[str, str] | None:
        """Return the two features of the axes; None if there is nothing to draw."""
        known = self._names or PAPER
        if bool(a.isnan().any()) and not self._names:  # no slope and offset
            return None
        if len(known) < 2:
            return None
        return self.features or (PAPER if set(PAPER) <= set(known) else (known[0], known[1]))

    def _on_axes(self, visits: Visits, axes: tuple[str, str]) -> Visits:
        if not self._names:
            return visits
        first, second = (visits.features[name] for name in axes)
        return replace(visits, delta=first, u=second)

    def _surface(
        self,
        trainer: Trainer,
        pl_module: Any,
        visits: Visits,
        a: Tensor,
        b: Tensor,
        axes: tuple[str, str],
        points: tuple[np.ndarray, np.ndarray],
    ) -> Surface:
        """Compute the surface over the grid of (D,) and (U,) ``points``."""
        vnet, (delta, u) = getattr(pl_module, "vnet", None), points
        others = [name for name in self._names if name not in axes]
        held = {name: float(np.median(visits.features[name])) for name in others}
        if vnet is not None:
            slope, offset = slope_and_offset(vnet, delta, u, axes, held)
        elif (a == a[0]).all() and (b == b[0]).all():
            slope, offset = (np.full((len(delta), len(u)), float(column[0])) for column in (a, b))
        else:
            raise UserError(
                "The weighting's slope or offset differs between pairs, but without a VNet it has no values "
                "between them; remove VNetSurfaces from trainer.callbacks."
            )
        visits = self._on_axes(visits, axes)
        data = datamodule(trainer)
        noise = None if data is None else data.noise_rate
        return Surface(
            step=trainer.global_step,
            method=pl_module.method,
            task="" if data is None else data.task,
            noise_rate=math.nan if noise is None else noise,
            delta=delta,
            u=u,
            a=slope,
            b=offset,
            density=density(visits, delta, u),
            visits=visits,
            axes=axes,
            held=", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in held.items()),
        )


class WeightDistributions(VisitFigures):
    """Distributions of the last visits' weights by label, and their precision and recall for known flips.

    On rank 0:

    - Tags, regularly and at the end: the image ``pair_weights/distributions``, on fixed axes, unless weights
      are constant; the histograms ``g``, ``u`` and ``delta`` of ``pair_weights/unflipped/...`` and
      ``pair_weights/flipped/...`` (``all`` or ``unknown`` if flips are unknown); and the precision-recall
      curves ``flips/low_weight`` and ``flips/low_u``, which W&B and MLflow get as an image.
    - Files, after ``steps`` and at the end: ``analysis/weight-distributions-step-NNNNN`` (.png and .pdf).
    - Cost: 0.1 ms per update, about 0.02 s for the pictures, and 0.2 s for the figures.

    Args:
        steps: policy updates after which figures are written, besides the end.
        window: number of last visits over all ranks, in whole steps; see ``LastVisits``.
        every: updates between two pictures for the loggers, or a share of the run, of which it may skip some;
            see ``Interval``. None for ``steps`` and the end only.
    """

    files = ("weight-distributions",)

    def show(self, trainer: Trainer, pl_module: Any, visits: Visits, a: Tensor, b: Tensor) -> None:
        """Log the picture, the histograms and the precision-recall curves."""
        if not trainer.loggers:
            return
        # Imported late: matplotlib is slow.
        from pacmr_lightning.analysis.cards import draw_distribution, draw_precision_recall
        from pacmr_lightning.analysis.distribution_figure import weights_by_flip

        differ = visits.weight.min() < visits.weight.max()
        columns = {"u": visits.u, "delta": visits.delta} | ({"g": visits.weight} if differ else {})
        for column, values in columns.items():
            for name, group in weights_by_flip(values, visits.flipped).items():
                log_histogram(trainer, f"{PAIR_WEIGHTS}/{name}/{column}", group)
        if differ:
            log_image(
                trainer, f"{PAIR_WEIGHTS}/distributions", draw_distribution(visits.weight, visits.flipped)
            )
        known = visits.flipped != UNKNOWN
        flipped = visits.flipped[known] == 1
        if flipped.any() and not flipped.all():
            scores = {"low_u": expit(-visits.u[known].astype(float))}
            scores |= {"low_weight": 1 - visits.weight[known]} if differ else {}
            log_precision_recall(trainer, "flips", flipped, scores, draw_precision_recall)

    def draw(self, trainer: Trainer, pl_module: Any, visits: Visits, a: Tensor, b: Tensor) -> None:
        """Draw the distributions of weights."""
        if visits.weight.min() == visits.weight.max():
            if visits.weight[0] != 1:  # users expect no figure of unweighted pairs
                rank_zero_info(
                    f"WeightDistributions draws nothing at step {trainer.global_step}: all weights are "
                    f"{visits.weight[0]:g}."
                )
            return
        # Imported late: matplotlib is slow.
        from pacmr_lightning.analysis.distribution_figure import draw_weight_distributions

        figure = draw_weight_distributions(visits.weight, visits.flipped, trainer.global_step)
        save_figure(figure, analysis_file(trainer, self.files[0]))
