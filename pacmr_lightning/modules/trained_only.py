"""Checkpoints that hold the adapter and what else is trained, and not the frozen base model."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule


class TrainedOnly(LightningModule):
    """A module whose checkpoints hold no frozen base; the base of ``PreferenceModule`` and ``SFTModule``."""

    def trained_names(self) -> list[str]:
        """Names of the parameters that are trained."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """As torch's; the frozen base, which is in no checkpoint, is not missing."""
        found = super().load_state_dict(*arguments, **options)
        trained = set(self.trained_names())
        found.missing_keys[:] = [name for name in found.missing_keys if name in trained]
        return found
