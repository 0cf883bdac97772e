"""Shows how the weights of unflipped and of flipped pairs are distributed."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pacmr_lightning.analysis.surface import Visits

from .to_loggers import log_histogram, publish
from .visits import VisitFigures


class WeightDistributions(VisitFigures):
    """Draws the distributions of the last weights by label, after chosen updates and at the end of the fit.

    They go to ``analysis/weight-distributions-step-NNNNN.png`` and .pdf in the run's folder, and to
    the loggers as the figure ``weights/distributions`` and the histograms ``weights/unflipped``,
    ``weights/flipped`` and, of pairs whose flip is unknown, ``weights/unknown`` (``weights/all`` where it is
    unknown of all). Weights that are all the same, as those of plain DPO, are not drawn.

    Args:
        steps: policy updates after which it draws, beside the end.
        window: visits of which it draws the weights, over all ranks, in whole steps; see ``LastVisits``.

    Raises:
        UserError: a step or ``window`` is under 1; or, at the first step, the module returns no record.
    """

    files = ("weight-distributions",)

    def __init__(self, steps: list[int] | None = None, window: int = 2000):
        super().__init__(steps, window)

    def draw(self, trainer: Trainer, pl_module: Any, visits: Visits, a: Tensor, b: Tensor) -> None:
        """See ``VisitFigures``."""
        if visits.weight.min() == visits.weight.max():
            if visits.weight[0] != 1:  # nobody expects a figure of pairs that all count alike
                rank_zero_info(
                    f"WeightDistributions draws nothing at step {trainer.global_step}: all weights are "
                    f"{visits.weight[0]:g}."
                )
            return
        # Imported here, so that a command that draws nothing does not wait for matplotlib.
        from pacmr_lightning.analysis.distribution_figure import draw, split

        for name, values in split(visits.weight, visits.flipped).items():
            log_histogram(trainer, f"weights/{name}", values)
        figure = draw(visits.weight, visits.flipped, trainer.global_step)
        publish(trainer, figure, self.files[0], "weights/distributions")
