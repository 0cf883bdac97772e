"""The datamodule of a run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def data_of(trainer: Trainer) -> Any:
    """The datamodule, of whatever class it is; None where the run has only loaders."""
    # Lightning sets the attribute without declaring it.
    return trainer.datamodule  # type: ignore[attr-defined]
