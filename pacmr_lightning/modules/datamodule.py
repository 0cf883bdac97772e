"""Access to the trainer's datamodule, which Lightning does not declare."""

from typing import Any

from lightning.pytorch import Trainer


def datamodule(trainer: Trainer) -> Any:
    """Return the trainer's datamodule; None if loaders were given."""
    return trainer.datamodule  # type: ignore[attr-defined]
