"""What a checkpoint of a preference run holds: adapter, weighting, objective and unlogged metrics."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import UserError
from ..metrics import Means, WeightStatistics
from ..weighting import Weighting
from .held_out import HeldOutSteps
from .resumed_options import OPTIMIZER, check_options, flat_options, is_fitting, trainer_options, use_options


class PreferenceCheckpoint(HeldOutSteps):
    """Saves and restores ``PreferenceModule``, which it is the base of."""

    weighting: Weighting
    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    options: dict[str, Any]
    train_means: Means
    weight_statistics: WeightStatistics
    outer_values: dict[str, Tensor]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the trainable parameters only; add options, the reference's digest and what is learned."""
        names = {f"policy.{name}" for name in self.policy.adapter()}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in names}
        checkpoint["options"] = self.options
        checkpoint["reference"] = self._reference_weights()
        checkpoint["weighting"] = self.weighting.state_dict()
        checkpoint["objective"] = self.objective.state_dict()
        checkpoint["metrics"] = {
            "means": self.train_means.gathered_state(),
            "weights": self.weight_statistics.gathered_state(),
            "outer": self.outer_values,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the weighting; check the adapter, the reference's weights and, in a fit, the options.

        Raises:
            UserError: the checkpoint belongs to another adapter, its reference had other weights, or a fit
                resumes with options that cannot change.
        """
        if is_fitting(self) and "weighting" in checkpoint:  # else it is another module's
            check_options(checkpoint["options"], self.options, checkpoint["global_step"])
        saved, needed = set(checkpoint["state_dict"]), {f"policy.{name}" for name in self.policy.adapter()}
        if saved != needed:
            odd = sorted(saved ^ needed)[0]
            raise UserError(
                f"The checkpoint does not fit this model's adapter ({len(saved ^ needed)} parameters differ, "
                f"{odd} for one); use the model and LoRA settings that it was trained with."
            )
        self._check_reference(checkpoint["reference"])
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

    def on_train_start(self) -> None:
        """Set this fit's learning rate, betas and weight decay where a checkpoint restored its own."""
        use_options(self, self.learning_rate, self.betas, self.weight_decay)

    def fit_options(self) -> dict[str, Any]:
        """Return the options that decide this fit's numbers, as plain values by dotted name."""
        policy = self.policy
        lora = {
            {"r": "rank", "lora_alpha": "alpha"}.get(name, name): value for name, value in policy.lora.items()
        }
        if not isinstance(lora["target_modules"], str):
            lora["target_modules"] = set(lora["target_modules"])  # their order changes nothing
        own = {name: getattr(self, name) for name in (*OPTIMIZER, "max_grad_norm", "micro_batch_size")}
        numbers = {
            "dtype": str(policy.dtype).removeprefix("torch."),
            "quantization": policy.quantization,
            "attn_implementation": policy.attn_implementation,
            "layout": policy.layout,
            "compile": policy.compiles,
        }
        found = {
            **own,
            "policy": {**lora, **numbers},
            "objective": self.objective,
            "weighting": self.weighting,
        }
        return {**flat_options("", found), **trainer_options(self)}

    def _reference_weights(self) -> dict[str, Any]:
        """Return the digest of the reference's weights, and what it depends on beside them."""
        policy = self.policy
        return {
            "digest": policy.reference_digest(),
            "dtype": str(policy.dtype),
            "quantization": policy.quantization,
        }

    def _check_reference(self, saved: dict[str, Any]) -> None:
        now = self._reference_weights()
        # In another precision the same weights are other bytes: a fit refuses that by the option's name.
        if now != saved and all(now[name] == saved[name] for name in ("dtype", "quantization")):
            raise UserError(
                f"The weights of {self.policy.name} differ from those that the checkpoint was trained on; "
                "restore them, or train again in a new folder."
            )
