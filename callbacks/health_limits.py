"""Limits at which Health warns: few pairs carry the weight, pairs are known already, or VNet stands still."""

from __future__ import annotations

from dataclasses import dataclass

from pacmr_lightning.errors import UserError


@dataclass
class Limits:
    """Where ``Health`` warns of a run that learns little; see there.

    Raises:
        UserError: one is out of its range.
    """

    min_effective_sample_size: float
    max_saturated_share: float
    max_idle_updates: int

    def __post_init__(self) -> None:
        if self.max_idle_updates < 1:
            raise UserError(f"max_idle_updates is {self.max_idle_updates}, but Health needs at least 1.")
        if not 0 <= self.min_effective_sample_size < 1:
            raise UserError(
                f"min_effective_sample_size is {self.min_effective_sample_size}, but it is a share: give one "
                "of at least 0 and below 1."
            )
        if not 0 < self.max_saturated_share <= 1:
            raise UserError(
                f"max_saturated_share is {self.max_saturated_share}, but it is a share: give one above 0 and "
                "at most 1."
            )

    def causes(self, found: dict[str, float], step: int) -> dict[str, str]:
        """By cause, a sentence on what is wrong and what to try, for those that are over their limits.

        Args:
            found: ``effective_sample_size``, ``saturated_share``, where VNet learns ``idle_vnet_updates``.
            step: policy updates done.
        """
        size, share = found["effective_sample_size"], found["saturated_share"]
        idle = found.get("idle_vnet_updates", 0)
        causes = {}
        if size < self.min_effective_sample_size:
            causes["effective_sample_size"] = (
                f"After {step} updates the weights count as {size:.0%} of the pairs (effective sample size), "
                "so few pairs decide; try a lower learning_rate of VNet, or a smaller beta."
            )
        if share > self.max_saturated_share:
            causes["saturated_share"] = (
                f"After {step} updates {share:.0%} of the pairs have sigmoid(u) above 0.999, from which the "
                "policy learns nothing more; try fewer epochs, a lower learning_rate, or a smaller beta."
            )
        if idle >= self.max_idle_updates:
            causes["idle_vnet_updates"] = (
                f"No meta pair was confident enough in {idle:.0f} VNet updates in a row, so VNet learned "
                "nothing; try a lower tau, a larger beta, or SoftPromptConsistency, which needs no "
                "confidence."
            )
        return causes
