"""Outer objectives: what the policy should be good at after the virtual step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import PairBatch
from ..errors import UserError
from ..gradient import Direction, accumulated_gradient, sum_over_ranks
from ..policy import PolicyModel
from ..rewards import Rewards


@dataclass
class OuterGradient:
    """d_meta, the gradient of the outer loss at the policy's current (shifted) parameters."""

    direction: Direction
    retained: int
    """Meta pairs over all ranks that contributed; 0 means that there is nothing to learn from."""
    metrics: dict[str, Tensor]
    """Scalars to log, over all ranks."""


class OuterObjective(ABC):
    """A loss of the meta pairs whose gradient with respect to omega is d_meta."""

    @abstractmethod
    def gradient(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: int | None
    ) -> OuterGradient:
        """The loss's gradient, summed over ranks; ``meta`` is this rank's share."""


class PromptAugmentationConsistency(OuterObjective):
    """The policy should judge a pair the same way when its prompt is reworded (paper, sections 5.2 and 5.3).

    The original view's u gives a hard pseudo-label where sigma(u) >= tau (0: first response better) or
    sigma(u) <= 1 - tau (1), without gradient; other pairs are left out and never run with gradient. The loss
    is 1/M sum of -log sigma(u(A(z))) for label 0 and -log sigma(-u(A(z))) for label 1, M being the size of
    the global meta batch, pairs that were left out included. Observed labels are not used.

    Args:
        tau: confidence threshold, 0.5 <= tau < 1; the paper uses 0.6.
    """

    def __init__(self, tau: float = 0.6):
        if not 0.5 <= tau < 1:
            raise UserError(f"tau is {tau}, but it must be at least 0.5 and below 1 (the paper uses 0.6).")
        self.tau = tau

    def gradient(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: int | None
    ) -> OuterGradient:
        """See ``OuterObjective``; ``meta.augmented`` holds the reworded views.

        Raises:
            UserError: the meta pairs have no augmented views.
        """
        if meta.augmented is None:
            raise UserError("The meta batch has no augmented views, which prompt consistency compares.")
        u = self._original_u(policy, beta, meta, micro_batch_size)
        # logit(tau) on u itself, since sigma(u) rounds to 1 for large u.
        threshold = math.log(self.tau / (1 - self.tau))
        kept = (u.abs() >= threshold).nonzero(as_tuple=True)[0]
        sign = torch.where(u >= threshold, 1.0, -1.0)[kept]
        # retained, meta pairs, pseudo-labels equal to the observed ones, same direction, l1, loss
        counts = u.new_tensor([len(kept), len(meta), (sign > 0).sum(), 0.0, 0.0, 0.0])
        sizes = counts[:2].clone()
        sum_over_ranks([sizes])

        def losses() -> Iterator[Tensor]:
            views, done = meta.augmented[kept], 0
            for part in views.micro_batches(micro_batch_size):
                rows = slice(done, done + len(part))
                done += len(part)
                rewards = Rewards(policy.log_probs(part), policy.reference_log_probs(part), beta)
                loss = -F.logsigmoid(sign[rows] * rewards.u)
                with torch.no_grad():
                    counts[3] += (sign[rows] * rewards.u > 0).sum()
                    counts[4] += 2 * (rewards.u.sigmoid() - u[kept][rows].sigmoid()).abs().sum()
                    counts[5] += loss.sum()
                yield loss.sum() / sizes[1]

        direction = accumulated_gradient(policy.adapter(), losses() if len(kept) else ())
        sum_over_ranks([counts])
        retained, total, observed, same, l1, loss = counts
        return OuterGradient(
            direction,
            int(retained),
            {
                "meta/loss": loss / total,
                "meta/coverage": retained / total,
                "meta/pseudo_labels_as_observed": observed / retained,
                "meta/direction_agreement": same / retained,
                "meta/l1": l1 / retained,
            },
        )

    @torch.no_grad()
    def _original_u(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: int | None
    ) -> Tensor:
        parts = [
            Rewards(policy.log_probs(part), policy.reference_log_probs(part), beta).u
            for part in meta.micro_batches(micro_batch_size)
        ]
        return torch.cat(parts)
