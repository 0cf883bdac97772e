"""Checkpoints without the frozen base model."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging

from ..errors import UserError


class TrainedOnly(LightningModule):
    """Base of modules whose checkpoints hold only trained parameters."""

    def configure_callbacks(self) -> list[Any]:
        """Refuse, before anything runs, Lightning's callbacks that would do nothing or fail; add none."""
        for callback in vars(self.trainer)["callbacks"]:  # Lightning sets it elsewhere, without a type
            why = None
            if isinstance(callback, StochasticWeightAveraging):
                why = "copies the module before its model is loaded, so it would average nothing"
            elif isinstance(callback, WeightAveraging) and not self.strict_loading:
                why = "stores all weights in checkpoints, which hold the adapter alone here"
            elif (
                type(callback) is ModelCheckpoint
                and callback._train_time_interval is not None
                and not self.automatic_optimization  # Lightning's own looks at the time otherwise
            ):
                why = "would ignore its train_time_interval; set checkpoint.train_time_interval instead"
            if why is not None:
                raise UserError(f"{type(callback).__name__} {why}; take it out of trainer.callbacks.")
        return []

    def trained_names(self) -> list[str]:
        """Return the names of trained parameters."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load as in torch, but do not report the frozen base as missing."""
        found = super().load_state_dict(*arguments, **options)
        trained = set(self.trained_names())
        found.missing_keys[:] = [name for name in found.missing_keys if name in trained]
        return found
