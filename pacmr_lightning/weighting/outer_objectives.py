"""Outer objectives: what the policy should be good at after the virtual step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import UNKNOWN, PairBatch
from ..errors import UserError
from ..gradient import Direction, accumulated_gradient
from ..policy import PolicyModel
from ..ranks import sum_over_ranks
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
    """A loss of the meta pairs whose gradient with respect to omega is d_meta.

    ``VNetWeighting`` asks for it at each of its updates, on every rank, while the policy runs at the virtual
    parameters; the reference stays where it is.
    """

    @abstractmethod
    def gradient(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: int | None
    ) -> OuterGradient:
        """The loss's gradient, summed over ranks, as ``gradient.accumulated_gradient`` makes it.

        Args:
            policy: gives ``log_probs`` of pairs, with gradient, and ``reference_log_probs``, without.
            beta: the objective's, for ``Rewards``.
            meta: this rank's M pairs. ``meta.augmented`` are the same pairs under reworded prompts; None
                where the datamodule has clean meta pairs. Where some are left out, the ranks' numbers of
                forward passes differ, and ``policy.in_step`` evens them out for ZeRO-3.
            micro_batch_size: pairs that a forward pass with gradient may hold; None for all.

        Raises:
            UserError: the meta pairs are of the wrong kind.
        """


class PromptConsistency(OuterObjective):
    """The policy should judge a pair the same way when its prompt is reworded (paper, section 5.2).

    Both kinds of pseudo-labels share the road: u of the original views without gradient, targets from it, and
    the cross-entropy of the augmented views against the targets, of the retained pairs only. Observed labels
    are not used.
    """

    @abstractmethod
    def targets(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """From (M,) original u: the (K,) indices that are retained and their (K,) targets in [0, 1]."""

    def divisor(self, retained: Tensor, total: Tensor) -> Tensor:
        """What the summed loss is divided by: M, the meta pairs over all ranks, unless overridden."""
        return total

    def gradient(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: int | None
    ) -> OuterGradient:
        """See ``OuterObjective``; ``meta.augmented`` holds the reworded views.

        Raises:
            UserError: the meta pairs have no augmented views.
        """
        if meta.augmented is None:
            raise UserError(
                f"{type(self).__name__} compares a pair with its reworded view, but the meta pairs have "
                "none; take clean_meta out of the datamodule."
            )
        if micro_batch_size is not None:
            meta = meta.longest_first()
        augmented = meta.augmented
        assert augmented is not None
        u = _u_without_gradient(policy, beta, meta, micro_batch_size)
        kept, targets = self.targets(u)
        flips, as_observed = meta.flipped[kept], targets >= 0.5
        known = flips != UNKNOWN
        right = known & (as_observed == (flips == 0))
        # retained, meta pairs, targets that side with the observed label, same direction, l1, loss, pairs
        # whose flip is known, targets that side with their clean label
        found = [len(kept), len(meta), as_observed.sum(), 0.0, 0.0, 0.0, known.sum(), right.sum()]
        counts = u.new_tensor(found)
        sizes = counts[:2].clone()
        sum_over_ranks([sizes])
        divisor = self.divisor(*sizes).clamp(min=1)

        def losses() -> Iterator[Tensor]:
            parts, done = augmented[kept].micro_batches(_even(len(kept), micro_batch_size)), 0
            for part, counted in policy.in_step(parts, augmented[:1]):
                view = Rewards(policy.log_probs(part), policy.reference_log_probs(part), beta).u
                if not counted:
                    yield 0 * view.sum()
                    continue
                rows = slice(done, done + len(part))
                done += len(part)
                target = targets[rows]
                loss = -target * F.logsigmoid(view) - (1 - target) * F.logsigmoid(-view)
                with torch.no_grad():
                    original = u[kept][rows]
                    counts[3] += ((original >= 0) == (view >= 0)).sum()
                    counts[4] += 2 * (view.sigmoid() - original.sigmoid()).abs().sum()
                    counts[5] += loss.sum()
                yield loss.sum() / divisor

        direction = accumulated_gradient(policy.adapter(), losses())
        sum_over_ranks([counts])
        retained, total, observed, same, l1, loss, of_known, clean = counts
        metrics = {
            "meta/loss": loss / divisor,
            "meta/coverage": retained / total,
            "meta/pseudo_labels_as_observed": observed / retained,
            "meta/direction_agreement": same / retained,
            "meta/l1": l1 / retained,
        }
        if of_known:
            metrics["meta/clean_accuracy"] = clean / of_known
        return OuterGradient(direction, int(retained), metrics)


class PromptAugmentationConsistency(PromptConsistency):
    """Consistency with hard pseudo-labels of confident pairs: the paper's outer objective (section 5.3).

    u of the original view gives label 0 (first response better) where sigma(u) >= tau and label 1 where
    sigma(u) <= 1 - tau; other pairs are left out and never run with gradient. The loss is 1/M sum of
    -log sigma(u(A(z))) for label 0 and -log sigma(-u(A(z))) for label 1.

    Args:
        tau: confidence threshold, 0.5 <= tau < 1; the paper uses 0.6.
        normalize: "meta" divides by M, the size of the global meta batch with the pairs that were left out
            (paper, section 5.4), "retained" by the number of the others (paper, section 5.3).
    """

    def __init__(self, tau: float = 0.6, normalize: Literal["meta", "retained"] = "meta"):
        if not 0.5 <= tau < 1:
            raise UserError(f"tau is {tau}, but it must be at least 0.5 and below 1 (the paper uses 0.6).")
        self.tau = tau
        self.normalize = normalize

    def targets(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Confident pairs and their labels, as the probability that the first response is better."""
        # logit(tau) on u itself, since sigma(u) rounds to 1 for large u.
        threshold = math.log(self.tau / (1 - self.tau))
        kept = (u.abs() >= threshold).nonzero(as_tuple=True)[0]
        return kept, (u[kept] >= threshold).to(u.dtype)

    def divisor(self, retained: Tensor, total: Tensor) -> Tensor:
        """M, or the number of retained pairs."""
        return total if self.normalize == "meta" else retained


class SoftPromptConsistency(PromptConsistency):
    """Consistency with soft pseudo-labels: cross-entropy against the stopped prediction sigma(u(z)).

    No threshold: every meta pair counts, an unsure one towards staying unsure. Hard labels reward confidence
    and can confirm themselves in long runs; these have no such reward.
    """

    def targets(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """All pairs and sigma(u)."""
        return torch.arange(len(u), device=u.device), u.sigmoid()


class CleanPreference(OuterObjective):
    """DPO's loss on pairs with clean labels: MWN-DPO (paper, appendix G, Algorithm 2)."""

    def loss(self, rewards: Rewards) -> Tensor:
        """(N,) losses of N meta pairs."""
        return -F.logsigmoid(rewards.u)

    def gradient(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: int | None
    ) -> OuterGradient:
        """See ``OuterObjective``.

        Raises:
            UserError: the meta pairs come with reworded views, so they are noisy training pairs.
        """
        if meta.augmented is not None:
            raise UserError(
                "CleanPreference learns from clean pairs, but the meta pairs are noisy training pairs; give "
                "the datamodule a source of clean ones as clean_meta."
            )
        if micro_batch_size is not None:
            meta = meta.longest_first()
        counts = torch.tensor([len(meta), 0.0, 0.0], device=meta.input_ids.device)
        total = counts[0].clone()
        sum_over_ranks([total])

        def losses() -> Iterator[Tensor]:
            for part in meta.micro_batches(_even(len(meta), micro_batch_size)):
                rewards = Rewards(policy.log_probs(part), policy.reference_log_probs(part), beta)
                loss = self.loss(rewards)
                counts[1] += loss.detach().sum()
                counts[2] += (rewards.u > 0).sum()
                yield loss.sum() / total

        direction = accumulated_gradient(policy.adapter(), losses())
        sum_over_ranks([counts])
        pairs, loss, right = counts
        return OuterGradient(
            direction, int(pairs), {"meta/loss": loss / pairs, "meta/accuracy": right / pairs}
        )


def _even(pairs: int, most: int | None) -> int | None:
    """Size of the fewest micro-batches that ``most`` allows, about equal, since the largest sets the peak."""
    return most if most is None or pairs <= most else math.ceil(pairs / math.ceil(pairs / most))


@torch.no_grad()
def _u_without_gradient(
    policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: int | None
) -> Tensor:
    parts = [
        Rewards(policy.log_probs(part), policy.reference_log_probs(part), beta).u
        for part in meta.micro_batches(micro_batch_size)
    ]
    return torch.cat(parts)
