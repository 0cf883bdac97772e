"""What a checkpoint of a preference run holds: adapter, weighting, objective and unlogged metrics."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import UserError
from ..metrics import Means, WeightStatistics
from ..weighting import Weighting
from .held_out import HeldOutSteps


class PreferenceCheckpoint(HeldOutSteps):
    """Saves and restores ``PreferenceModule``, which it is the base of."""

    weighting: Weighting
    train_means: Means
    weight_statistics: WeightStatistics
    outer_values: dict[str, Tensor]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the trainable parameters only; adds what the weighting learned and unlogged metrics."""
        names = {f"policy.{name}" for name in self.policy.adapter()}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in names}
        checkpoint["weighting"] = self.weighting.state_dict()
        checkpoint["objective"] = self.objective.state_dict()
        checkpoint["metrics"] = {
            "means": self.train_means.gathered_state(),
            "weights": self.weight_statistics.gathered_state(),
            "outer": self.outer_values,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the weighting; checks that every trainable parameter is there and nothing is left over.

        Raises:
            UserError: the checkpoint belongs to another adapter.
        """
        saved, needed = set(checkpoint["state_dict"]), {f"policy.{name}" for name in self.policy.adapter()}
        if saved != needed:
            odd = sorted(saved ^ needed)[0]
            raise UserError(
                f"The checkpoint does not fit this model's adapter ({len(saved ^ needed)} parameters differ, "
                f"{odd} for one); use the model and LoRA settings that it was trained with."
            )
        for part in ("weighting", "objective"):
            if checkpoint[part].keys() != getattr(self, part).state_dict().keys():
                raise UserError(
                    f"The checkpoint was made with another {part} than {type(getattr(self, part)).__name__}; "
                    "use the one that it was made with."
                )
        self.weighting.load_state_dict(checkpoint["weighting"])
        self.objective.load_state_dict(checkpoint["objective"])
        metrics = checkpoint["metrics"]
        # They are sums over all ranks, of which one goes on with them.
        if self.global_rank == 0:
            self.train_means.load_state_dict(metrics["means"])
            self.weight_statistics.load_state_dict(metrics["weights"])
        self.outer_values = metrics["outer"]
