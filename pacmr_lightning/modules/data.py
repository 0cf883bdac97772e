"""The trainer's datamodule, of which the modules ask more than Lightning's own class has."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def datamodule(trainer: Trainer) -> Any:
    """The trainer's datamodule, of any class that has what is asked of it; None where loaders were given."""
    # Lightning sets it without declaring it.
    return trainer.datamodule  # type: ignore[attr-defined]
