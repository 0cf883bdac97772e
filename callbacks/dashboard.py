"""Callback that shows a run's main curves and settings in its loggers."""

import os
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from pacmr_lightning.modules.metrics import PAIR_WEIGHTS
from pacmr_lightning.modules.schedule import datamodule

CHARTS = {
    "Accuracy": ("train/rewards/accuracies", "val/rewards/accuracies"),
    "Loss": ("train/loss", "val/loss"),
    "Mean weights": ("train/weights/unflipped", "train/weights/flipped"),
    "Weight gap": ("train/weights/gap",),
    "VNet: norm of d_meta": ("train/meta/d_norm",),
    "VNet: coverage": ("train/meta/coverage",),
    "VNet: updates done and skipped": ("lr-VNet-updates", "train/meta/skipped_updates"),
    "Gold reward": ("val/gold_reward",),
    "KL to the reference": ("val/sequence_kl",),
}
"""Title and metrics of each chart of TensorBoard's custom scalars."""
RESULTS = (
    *("val/rewards/accuracies", "val/rewards/margins", "val/sequence_kl", "val/gold_reward"),
    *(f"{PAIR_WEIGHTS}/probe_gap", f"{PAIR_WEIGHTS}/probe_auroc"),
)
"""Metrics of a run in TensorBoard's HPARAMS."""


class Dashboard(Callback):
    """A run's main curves and settings, for its loggers.

    Tags:

    - In TensorBoard's CUSTOM SCALARS: accuracy and loss, weights and weight gap, VNet's updates, gold reward
      and KL in nine charts (``CHARTS``).
    - In TensorBoard's HPARAMS: settings and the last values of ``RESULTS``, to compare runs. W&B and MLflow
      get the settings as configuration and parameters.

    Files: none. Cost: under 0.1 ms per update.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log settings and layout, unless the run is resumed."""
        if trainer.global_step or not trainer.is_global_zero:
            return
        settings = settings_of(trainer, pl_module)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # Imported late: it is slow.
                from torch.utils.tensorboard.summary import hparams

                # Not add_hparams, which makes a run of its own.
                for part in hparams(settings, dict.fromkeys(RESULTS, 0.0)):
                    logger.experiment.file_writer.add_summary(part)
                charts = {
                    title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in CHARTS.items()
                }
                logger.experiment.add_custom_scalars({"At a glance": charts})
            elif not isinstance(logger, CSVLogger):
                logger.log_hyperparams(settings)


def settings_of(trainer: Trainer, pl_module: Any) -> dict[str, str | int | float]:
    """Return the run's settings, without those that it lacks."""
    data, weighting = datamodule(trainer), cast(Any, getattr(pl_module, "weighting", None))
    policy, objective = (getattr(pl_module, name, None) for name in ("policy", "objective"))
    outer = getattr(weighting, "outer", None)
    settings = {
        "method": getattr(pl_module, "method", None),
        "task": getattr(data, "task", None),
        "model": getattr(policy, "name", None),
        "noise_rate": getattr(data, "noise_rate", None),
        "seed": int(seed) if (seed := os.environ.get("PL_GLOBAL_SEED")) else None,
        "beta": getattr(objective, "beta", None),
        "learning_rate": getattr(pl_module, "learning_rate", None),
        "batch_size": getattr(data, "global_batch_size", None),
        "lora_rank": (getattr(policy, "lora", None) or {}).get("r"),
    }
    if getattr(weighting, "vnet", None) is not None:
        settings |= {
            "vnet_learning_rate": getattr(weighting, "learning_rate", None),
            "vnet_every": weighting.every,
            "vnet_tau": getattr(outer, "tau", None),
            "vnet_estimator": type(getattr(weighting, "estimator", None)).__name__,
            "vnet_outer": type(outer).__name__,
        }
    return {name: value for name, value in settings.items() if value is not None}
