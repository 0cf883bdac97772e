"""A step's training pairs: rewards, losses and gradients at omega, and estimators of the coefficients c_i.

The virtual step, the coefficients and the policy's own gradient need the same pairs at the same omega. If
memory allows, each pair's gradient is kept from one pass for all three; else the pairs run again for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ..batch import MicroBatchSize, PairBatch
from ..errors import UserError, check_within
from ..objectives import Objective
from ..policy import Direction, PolicyModel
from ..policy.lora_layer import UnsupportedLoraError
from ..policy.token_layout import Rows
from ..rewards import Rewards

AskedGradients = bool | Literal["auto"]
"""True to keep each pair's gradient; "auto" decides by memory."""


@dataclass
class Part:
    """A micro-batch of n consecutive pairs of the step."""

    batch: PairBatch
    rewards: Rewards
    losses: Tensor
    """(n,) l(u) of the observed labels; as the rewards with their graph, unless ``each`` is given."""
    each: Direction | None = None
    """Kept gradients of l_i, (n, *shape) by parameter."""


@dataclass(eq=False)
class StepPairs:
    """This rank's N pairs of an optimizer step, while the policy's parameters stay at omega.

    Args:
        policy: at omega; it is not changed.
        objective: the per-pair loss l.
        batch: N pairs; reference log-probabilities that it lacks are computed.
        micro_batch_size: pairs of a forward pass, or a ``TokenBudget``; None for all pairs.
        keep: each pair's gradient from one forward and one backward pass; else pairs run for each result.
            "auto" keeps none under ZeRO-3, beyond memory, or if a LoRA layer mixes rows.

    Raises:
        UnsupportedLoraError: ``keep`` is true, but a LoRA layer mixes rows.
    """

    policy: PolicyModel
    objective: Objective
    batch: PairBatch
    micro_batch_size: MicroBatchSize
    keep: AskedGradients = False

    def __post_init__(self) -> None:
        self.parts: list[tuple[PairBatch, Rows]] = []
        """By forward pass, with reference log-probabilities, and their rows."""
        for part in self.batch.micro_batches(self.micro_batch_size):
            rows = self.policy.rows(part)
            reference = self.policy.reference_log_probs(part, rows)
            self.parts.append((part.with_reference(reference), rows))
        self.kept: list[Part] | None = None
        if self.keep is True or (self.keep == "auto" and self.policy.keeps_gradients(len(self.batch))):
            try:
                self.kept = [Part(part, *self.each_gradient(part, rows)) for part, rows in self.parts]
            except UnsupportedLoraError:
                if self.keep is True:
                    raise

    def __iter__(self) -> Iterator[Part]:
        """Yield the micro-batches, one at a time; without kept gradients after a forward pass of each."""
        if self.kept is not None:
            return iter(self.kept)
        return (Part(part, *self.forward(part, rows)) for part, rows in self.parts)

    def add_gradient(
        self, total: Direction, part: Part, factors: Tensor, swapped: Tensor | None = None
    ) -> None:
        """Add sum_i f_i grad l_i to this rank's ``total``, for (n,) factors; frees the part's graph.

        (n,) ``swapped``, of soft labels, are factors of the losses l(-u) of the other label.
        """
        if part.each is None:
            value = (factors * part.losses).sum()
            if swapped is not None:
                value = value + (swapped * self.objective(part.rewards.exchanged())).sum()
            self.policy.add_gradient(total, value)
            return
        assert swapped is None, "a weighting that learns has no soft labels"
        for name, gradients in part.each.items():
            total[name] += torch.tensordot(factors.to(gradients.dtype), gradients, 1)

    def along(self, direction: Direction) -> Tensor:
        """Return (N,) direction . grad l_i, exactly; UnsupportedLoraError if a LoRA layer mixes rows.

        Kept gradients are multiplied; others in one forward and one backward pass, and dropped.
        """
        if self.kept is None:
            return torch.cat([self.each_gradient(part, rows, direction)[2]["e"] for part, rows in self.parts])
        each = [part.each or {} for part in self.kept]
        dots = [[g.flatten(1) @ direction[name].flatten() for name, g in part.items()] for part in each]
        return torch.cat([torch.stack(part).sum(0) for part in dots])

    @torch.no_grad()
    def current_losses(self) -> Tensor:
        """Return (N,) l_i at the policy's current parameters, also shifted ones, from a forward pass."""
        return torch.cat([self.forward(part, rows)[1] for part, rows in self.parts])

    def forward(self, part: PairBatch, rows: Rows) -> tuple[Rewards, Tensor]:
        """Return rewards and (n,) losses of one of ``parts``, with gradient."""
        rewards = Rewards.of(self.policy.log_probs(part, rows), part, self.objective.beta)
        return rewards, self.objective(rewards)

    def each_gradient(
        self, part: PairBatch, rows: Rows, direction: Direction | None = None
    ) -> tuple[Rewards, Tensor, Direction]:
        """Return rewards, (n,) losses and ``single_gradients`` of l_i of one of ``parts``, from one pass."""
        with self.policy.single_gradients(rows, direction) as leaves, torch.enable_grad():
            rewards, losses = self.forward(part, rows)
            each = torch.autograd.grad(losses.sum(), [*leaves.values()], materialize_grads=True)
        return rewards.detach(), losses.detach(), dict(zip(leaves, each, strict=True))


RecomputedStepPairs = StepPairs  # by its default, which keeps nothing


class MetaGradientEstimator(ABC):
    """Estimates c_i for N pairs, once per VNet update, on every rank.

    Args:
        clip: coefficients are clipped to [-clip, clip] (Qu et al.: 10); None for no clipping.

    Raises:
        UserError: ``clip`` is not above 0.
    """

    def __init__(self, clip: float | None = 10.0):
        check_within("(0, inf]", " (Qu et al.: 10) or null for none", clip=clip)
        self.clip = clip

    @abstractmethod
    def coefficients(self, pairs: StepPairs, direction: Direction) -> Tensor:
        """Return (N,) unclipped coefficients.

        Args:
            pairs: this rank's N train pairs at omega, which must not change: ``PolicyModel.shifted`` runs
                the policy elsewhere, where ``pairs.current_losses()`` are other losses.
            direction: d, full-size and the same on all ranks.
        """

    def clipped(self, coefficients: Tensor) -> Tensor:
        """Return (N,) clipped coefficients, which VNet learns from."""
        return coefficients if self.clip is None else coefficients.clamp(-self.clip, self.clip)


class CentralDifference(MetaGradientEstimator):
    """[l_i(omega + eps d) - l_i(omega - eps d)] / (2 eps), from two forward passes (Qu et al.).

    Args:
        epsilon: eps; Qu et al. use 3e-3.
        relative: the step is epsilon / norm(d), so its length does not depend on d's. Under a bf16 base a raw
            step along a short d drowns in rounding; 0.03 to 0.1 relative survives it.
        clip: see ``MetaGradientEstimator``.
    """

    def __init__(self, epsilon: float = 3e-3, relative: bool = False, clip: float | None = 10.0):
        super().__init__(clip)
        check_within("(0, inf)", " (Qu et al.: 0.003)", epsilon=epsilon)
        self.epsilon = epsilon
        self.relative = relative

    def coefficients(self, pairs: StepPairs, direction: Direction) -> Tensor:
        """Return (N,) unclipped coefficients."""
        if pairs.objective.holds_factors:
            name = type(pairs.objective).__name__
            raise UserError(
                f"CentralDifference takes differences of the loss, but {name} holds factors of it fixed; use "
                "GhostDotProduct."
            )
        step = self.epsilon / float(get_total_norm(direction.values())) if self.relative else self.epsilon
        sides = []
        for sign in (1, -1):
            with pairs.policy.shifted(direction, sign * step):
                sides.append(pairs.current_losses())
        return (sides[0] - sides[1]) / (2 * step)


class GhostDotProduct(MetaGradientEstimator):
    """c_i exactly by ghost dot products, in at most one ordinary backward pass (``StepPairs.along``)."""

    def coefficients(self, pairs: StepPairs, direction: Direction) -> Tensor:
        """Return (N,) unclipped coefficients."""
        return pairs.along(direction)
