"""The trainer's datamodule, which Lightning sets without declaring it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def datamodule(trainer: Trainer) -> Any:
    """The trainer's datamodule, of any class that has what is asked of it; None where loaders were given."""
    return trainer.datamodule  # type: ignore[attr-defined]
