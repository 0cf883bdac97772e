"""Callback that shows a run's main curves, settings and description in its loggers."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from pacmr_lightning.modules.datamodule import datamodule

from .to_loggers import PAIR_WEIGHTS, log_texts

AT_A_GLANCE = "at_a_glance"
"""Group of names that loggers show first."""
GLANCE = {
    "train/rewards/accuracies": "accuracy_train",
    "val/rewards/accuracies": "accuracy_validation",
    "train/weights/gap": "gap_of_weights",
    "val/gold_reward": "gold_reward",
    "val/sequence_kl": "kl",
    "train/loss": "loss_train",
    "val/loss": "loss_validation",
    "train/weights/flipped": "mean_weight_flipped",
    "train/weights/unflipped": "mean_weight_unflipped",
    "train/meta/coverage": "vnet_coverage",
    "train/meta/d_norm": "vnet_norm_of_d_meta",
    "train/meta/skipped_updates": "vnet_skipped_updates",
    "lr-VNet-updates": "vnet_updates",
}
"""Metrics of the group and their names there, in the alphabetical order of loggers."""
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
RESULTS = {
    "val/rewards/accuracies": "accuracy",
    "val/rewards/margins": "margin",
    f"{PAIR_WEIGHTS}/window_gap": "weight gap",
    f"{PAIR_WEIGHTS}/window_auroc": "flip AUROC",
    "val/sequence_kl": "KL",
    "val/gold_reward": "gold reward",
}
"""Metrics of a run in TensorBoard's HPARAMS."""
SETTINGS = (
    *("beta", "learning_rate", "method", "model", "noise_rate", "seed", "task"),
    *("vnet_learning_rate", "vnet_every", "vnet_tau", "vnet_estimator", "vnet_outer"),
)
"""Settings of a run in TensorBoard's HPARAMS, the same names for all methods."""


class Dashboard(Callback):
    """A run's main curves, settings and description, for its loggers.

    Tags:

    - ``at_a_glance/...``: thirteen curves (``GLANCE``) again, under names that sort first: accuracy and loss,
      weights and weight gap, VNet's updates, gold reward and KL. ``metrics.csv`` has them once.
    - In TensorBoard's CUSTOM SCALARS: the same curves in nine charts (``CHARTS``).
    - In TensorBoard's HPARAMS: ``SETTINGS`` and the last values of ``RESULTS``, to compare runs. W&B and
      MLflow get the settings as configuration and parameters.
    - The text ``about``: model, data, labels, method and training in five lines.

    Files: none. Cost: under 0.1 ms per update.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the logger of ``at_a_glance``."""
        if stage == "fit":
            own = [logger for logger in trainer.loggers if not isinstance(logger, AtAGlance)]
            shown = [logger for logger in own if not isinstance(logger, CSVLogger)]
            trainer.loggers = [*own, AtAGlance(shown)] if shown else own

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log settings, description and layout, unless the run is resumed."""
        if trainer.global_step or not trainer.is_global_zero:
            return
        settings = settings_of(trainer, pl_module)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                _log_hparams(logger, settings, Path(trainer.default_root_dir))
                # Not the metrics' own names: an SFT run beside it logs train/loss too.
                charts = {
                    title: ["Multiline", [f"^{AT_A_GLANCE}/{GLANCE[tag]}$" for tag in tags]]
                    for title, tags in CHARTS.items()
                }
                logger.experiment.add_custom_scalars({"At a glance": charts})
            elif not isinstance(logger, (CSVLogger, AtAGlance)):
                logger.log_hyperparams(settings)
        lines = description_of(trainer, pl_module, settings)
        log_texts(trainer, "about", {name: {"This run": line} for name, line in lines.items()})


class AtAGlance(Logger):
    """A logger that repeats the metrics of ``GLANCE`` in other loggers, as ``at_a_glance/...``."""

    def __init__(self, loggers: Sequence[Logger]):
        super().__init__()
        self.others = loggers

    @property
    def name(self) -> None:
        """No name."""

    @property
    def version(self) -> int | str | None:
        """That of the first logger, which Lightning's progress bar then shows once."""
        return self.others[0].version

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the metrics of ``GLANCE`` among these under their names there."""
        found = {f"{AT_A_GLANCE}/{name}": metrics[tag] for tag, name in GLANCE.items() if tag in metrics}
        for logger in self.others if found else ():
            logger.log_metrics(found, step)


def settings_of(trainer: Trainer, pl_module: Any) -> dict[str, str | int | float]:
    """Return the run's ``SETTINGS``, ``batch_size`` and ``lora_rank``, without those that it lacks."""
    data, weighting = datamodule(trainer), cast(Any, getattr(pl_module, "weighting", None))
    policy, objective = (getattr(pl_module, name, None) for name in ("policy", "objective"))
    outer = getattr(weighting, "outer", None)
    seed = os.environ.get("PL_GLOBAL_SEED")
    found = {
        "method": getattr(pl_module, "method", None),
        "task": getattr(data, "task", None),
        "model": getattr(policy, "name", None),
        "noise_rate": getattr(data, "noise_rate", None),
        "seed": None if seed is None else int(seed),
        "beta": getattr(objective, "beta", None),
        "learning_rate": getattr(pl_module, "learning_rate", None),
        "batch_size": getattr(data, "global_batch_size", None),
        "lora_rank": (getattr(policy, "lora", None) or {}).get("r"),
    }
    if getattr(weighting, "vnet", None) is not None:
        found |= {
            "vnet_learning_rate": getattr(weighting, "learning_rate", None),
            "vnet_every": weighting.every,
            "vnet_tau": getattr(outer, "tau", None),
            "vnet_estimator": type(getattr(weighting, "estimator", None)).__name__,
            "vnet_outer": type(outer).__name__,
        }
    return {name: value for name, value in found.items() if value is not None}


def description_of(trainer: Trainer, pl_module: Any, settings: dict[str, Any]) -> dict[str, str]:
    """Return one line each about model, data, labels, method and training, by name."""

    def parts(*names: str) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {settings[name]}" for name in names if name in settings)

    data, counts = datamodule(trainer), getattr(datamodule(trainer), "counts", None) or {}
    kept = {split: found.get("kept") for split, found in counts.items() if isinstance(found, dict)}
    pairs = [f"{number:,} {split} pairs" for split, number in kept.items() if number]
    rate = settings.get("noise_rate") if hasattr(data, "noise_seed") else None
    kinds = [type(getattr(pl_module, name, None)).__name__ for name in ("objective", "weighting")]
    vnet = parts("vnet_learning_rate", "vnet_every", "vnet_tau", "vnet_estimator", "vnet_outer")
    how = ", ".join(kind for kind in kinds if kind != "NoneType")
    updates = f"{trainer.estimated_stepping_batches:,} updates"
    lines = {
        "Model": ", ".join(filter(None, (str(settings.get("model", "")), parts("lora_rank")))),
        "Data": ", ".join([str(settings.get("task", "")), *pairs]),
        "Labels": f"{rate:.0%} flipped, noise seed {data.noise_seed}" if rate else "as found",
        "Method": ", ".join(filter(None, (str(settings.get("method", "")), how, parts("beta"), vnet))),
        "Training": ", ".join(filter(None, (updates, parts("batch_size", "learning_rate", "seed")))),
    }
    return {name: line for name, line in lines.items() if line}


def _log_hparams(logger: TensorBoardLogger, settings: dict[str, Any], folder: Path) -> None:
    """Write TensorBoard's HPARAMS of the run in ``folder`` into its own event file."""
    # Imported late: it is slow.
    from tensorboard.plugins.hparams import summary_v2 as api

    names = [api.HParam(setting) for setting in SETTINGS]
    metrics = [api.Metric(tag, display_name=title) for tag, title in RESULTS.items()]
    writer = logger.experiment.file_writer
    writer.add_summary(api.hparams_config_pb(hparams=names, metrics=metrics))
    shown = {setting: value for setting, value in settings.items() if setting in SETTINGS}
    # The name comes first, since columns are narrow. Runs with equal ids would count as repetitions.
    writer.add_summary(api.hparams_pb(shown, trial_id=f"{folder.name} ({folder.parent})"))
