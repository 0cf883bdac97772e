"""PACMR-DPO's VNet trained on held-out pairs as noisy as the training pairs: does it weight better?

    PYTHONPATH=. pacmr fit --config quickstart/preference --config methods/pacmr \\
      --model.policy.model MODEL --model.objective.beta 2 \\
      --data.clean_meta Files --data.clean_meta.train held_out.jsonl \\
      --model.weighting.outer research.held_out_pairs.HeldOutPreference \\
      --model.weighting.outer.label_noise 0.3

A custom outer objective (docs/extending.md), evaluated in research/notebook/changes-to-pacmr.md.
"""

from __future__ import annotations

from torch import Tensor

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import CleanPreference, OuterGradient
from pacmr_lightning.objectives import RDPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards


class HeldOutPreference(CleanPreference):
    """rDPO's loss (arXiv 2403.00409) on held-out pairs: the clean loss's expectation under flips.

    Args:
        label_noise: their noise rate, in [0, 0.5).
    """

    def __init__(self, label_noise: float):
        self.label_noise = RDPO(label_noise=label_noise).rate

    def loss(self, rewards: Rewards) -> Tensor:
        """(N,) losses of a meta-batch of N pairs."""
        return RDPO(rewards.beta, self.label_noise)(rewards)

    def gradient(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: int | None
    ) -> OuterGradient:
        """Return the gradient; UserError if they are training pairs."""
        if meta.augmented is not None:
            raise UserError(
                "HeldOutPreference learns from pairs that are not trained on; give the datamodule a source "
                "of them as clean_meta."
            )
        return super().gradient(policy, beta, meta, micro_batch_size)
