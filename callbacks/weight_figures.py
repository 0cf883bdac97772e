"""Figures of the last visited pairs: VNet's surfaces, and the distributions of weights."""

from __future__ import annotations

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
from torch import Tensor

from pacmr_lightning.analysis.surface import Surface, Visits, density, grid, save_surface, slope_and_offset
from pacmr_lightning.errors import UserError, check_at_least
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.rewards import PairRecord
from pacmr_lightning.runs.folder import ANALYSIS
from pacmr_lightning.weighting.features import PAPER, Feature

from .to_loggers import log_histogram, log_numbers, publish
from .visits import VisitsCallback


class VisitFigures(VisitsCallback):
    """Base of callbacks that draw the last visits.

    Args:
        steps: policy updates after which it draws, each at least 1, beside the end of the fit.
        window: visits that it looks back on, over all ranks, in whole steps; see ``LastVisits``.

    Raises:
        UserError: a step or ``window`` is under 1, or the module returns no record.
    """

    files: tuple[str, ...]
    """Names of its files in RUN/analysis, without ``-step-NNNNN`` and ending."""

    def __init__(self, steps: list[int] | None = None, window: int = 2000):
        super().__init__(window, columns=6)
        if steps and min(steps) < 1:
            raise UserError(f"steps is {list(steps)}, but policy updates count from 1.")
        self.steps = frozenset(steps or ())
        self._names: tuple[str, ...] = ()

    @abstractmethod
    def draw(self, trainer: Trainer, pl_module: Any, visits: Visits, a: Tensor, b: Tensor) -> None:
        """Draw N finite ``visits``, oldest first, on rank 0; (N,) ``a`` and ``b`` are NaN if undefined."""

    def is_due(self, step: int) -> bool:
        """Draw after the chosen steps."""
        return step in self.steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the columns of VNet's features."""
        super().setup(trainer, pl_module, stage)
        # The features of a VNet other than (Delta, u) are kept too.
        names = tuple(getattr(getattr(pl_module, "vnet", None), "features", PAPER))
        self._names = () if names == PAPER else names
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

    def look(self, trainer: Trainer, pl_module: Any, rows: Tensor) -> None:
        """Draw the visits with finite numbers; a and b may be NaN."""
        rows = rows[torch.cat([rows[:, 1:5], rows[:, 7:]], dim=1).isfinite().all(dim=1)]
        if len(rows) and trainer.is_global_zero:
            _, u, delta, weight, flipped, a, b, *features = rows.unbind(1)
            visits = Visits(u.numpy(), delta.numpy(), weight.numpy(), flipped.numpy().astype(np.int8))
            visits.features = {n: column.numpy() for n, column in zip(self._names, features, strict=True)}
            self.draw(trainer, pl_module, visits, a, b)


class VNetSurfaces(VisitFigures):
    """Draw a(z), b(z) and g(z) over the (Delta, u) of the last pairs, after chosen updates and at the end.

    It writes ``analysis/surfaces-step-NNNNN`` (.png, .pdf, and .npz for ``pacmr surfaces``) and
    ``heat-maps-...``, and logs both, ``weights/monotone_share``, the share of the grid on which g rises with
    u, and ``weights/monotone_share_data``, that of the cells that hold a pair. Weightings without slope and
    offset are not drawn; of a VNet of other features only g is, over two, the others at their medians.

    Args:
        steps: policy updates after which it draws, beside the end.
        points: of the grid along either axis, at least 2.
        window: visits that the grid has to cover, over all ranks, in whole steps; see ``LastVisits``.
        features: of VNet's features the two that the axes show, except that Delta always comes before u; None
            means these where it has both, else its first two.

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
    ):
        super().__init__(steps, window)
        check_at_least(2, points=points)
        self.points = points
        self.features = PAPER if features and set(features) == set(PAPER) else features

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that VNet has the features."""
        super().setup(trainer, pl_module, stage)
        known = self._names or PAPER
        if self.features and not (set(self.features) <= set(known) and len(set(self.features)) == 2):
            raise UserError(
                f"features is {' and '.join(self.features)}, but VNetSurfaces draws two different ones of "
                f"those that VNet looks at ({', '.join(known)})."
            )

    def draw(self, trainer: Trainer, pl_module: Any, visits: Visits, a: Tensor, b: Tensor) -> None:
        """Draw and save the surfaces."""
        vnet = getattr(pl_module, "vnet", None)
        known = self._names or PAPER
        if bool(a.isnan().any()) and not self._names:  # no slope and offset
            return
        if len(known) < 2:
            rank_zero_info(f"VNetSurfaces draws nothing, because VNet looks at {known[0]} alone.")
            return
        axes = self.features or (PAPER if set(PAPER) <= set(known) else (known[0], known[1]))
        held = {name: float(np.median(visits.features[name])) for name in known if name not in axes}
        if self._names:
            first, second = (visits.features[name] for name in axes)
            visits = replace(visits, delta=first, u=second)
        delta, u = grid(visits, self.points, axes)
        if vnet is not None:
            slope, offset = slope_and_offset(vnet, delta, u, axes, held)
        elif (a == a[0]).all() and (b == b[0]).all():
            slope, offset = (np.full((len(delta), len(u)), float(column[0])) for column in (a, b))
        else:
            raise UserError(
                "The weighting's slope or offset differs between pairs, but it has no VNet to ask about "
                "others; take VNetSurfaces out of trainer.callbacks."
            )
        data = datamodule(trainer)
        noise = None if data is None else data.noise_rate
        surface = Surface(
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
        save_surface(surface, trainer.default_root_dir)
        shares = {"monotone_share": surface.monotone_share()}
        shares["monotone_share_data"] = surface.monotone_share(with_data=True)
        log_numbers(trainer, {f"weights/{name}": share for name, share in shares.items()})
        # Imported late: matplotlib is slow.
        from pacmr_lightning.analysis.surface_figure import draw_heat_maps, draw_surfaces

        publish(trainer, draw_surfaces(surface), self.files[0], "weights/surfaces")
        publish(trainer, draw_heat_maps(surface), self.files[1], "weights/heat_maps")


class WeightDistributions(VisitFigures):
    """Draw the distributions of the last weights by label, after chosen updates and at the end of the fit.

    Files are ``analysis/weight-distributions-step-NNNNN.png`` and .pdf. Constant weights are not drawn.
    """

    files = ("weight-distributions",)

    def draw(self, trainer: Trainer, pl_module: Any, visits: Visits, a: Tensor, b: Tensor) -> None:
        """Draw and log the distributions."""
        if visits.weight.min() == visits.weight.max():
            if visits.weight[0] != 1:  # of unweighted pairs no figure is expected
                rank_zero_info(
                    f"WeightDistributions draws nothing at step {trainer.global_step}: all weights are "
                    f"{visits.weight[0]:g}."
                )
            return
        # Imported late: matplotlib is slow.
        from pacmr_lightning.analysis.distribution_figure import draw_weight_distributions, weights_by_flip

        for name, values in weights_by_flip(visits.weight, visits.flipped).items():
            log_histogram(trainer, f"weights/{name}", values)
        figure = draw_weight_distributions(visits.weight, visits.flipped, trainer.global_step)
        publish(trainer, figure, self.files[0], "weights/distributions")
