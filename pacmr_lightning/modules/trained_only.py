"""Checkpoints without the frozen base model."""

from typing import Any

from lightning.pytorch import LightningModule


class TrainedOnly(LightningModule):
    """Base of modules whose checkpoints hold only trained parameters."""

    def trained_names(self) -> list[str]:
        """Return the names of trained parameters."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load as in torch, but do not report the frozen base as missing."""
        found = super().load_state_dict(*arguments, **options)
        trained = set(self.trained_names())
        found.missing_keys[:] = [name for name in found.missing_keys if name in trained]
        return found
