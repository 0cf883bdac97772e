"""A step's training pairs at the policy's current parameters: rewards, losses and gradients.

The virtual step, the coefficients c_i and the policy's own gradient need the same pairs at the same omega. If
memory allows, each pair's gradient is kept from one pass for all three; else the pairs run again for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ..batch import MicroBatchSize, PairBatch
from ..objectives import Objective
from ..policy import Direction, PolicyModel
from ..policy.lora_layer import UnsupportedLoraError
from ..policy.memory import ram
from ..policy.token_layout import Rows
from ..rewards import Rewards
from ..strategies.ranks import min_over_ranks, ranks

FREE = 0.8
"""Kept gradients' share of the memory that a GPU's largest step so far has left free."""
RAM_SHARE = 1 / 8
"""Kept gradients' share of the RAM, without a GPU."""
SMALL = 2**26
"""Bytes that kept gradients may always take."""
GIB = 2**30

AskedGradients = bool | Literal["auto"]
"""True to keep each pair's gradient; "auto" decides by memory."""


@dataclass
class Part(ABC):
    """A micro-batch of n consecutive pairs of the step; its values have no gradient."""

    batch: PairBatch
    rewards: Rewards
    losses: Tensor
    """(n,) l(u) of the observed labels."""

    @abstractmethod
    def add_gradient(self, total: Direction, factors: Tensor, swapped: Tensor | None = None) -> None:
        """Add sum_i f_i grad l_i to this rank's ``total``, for (n,) factors; once for each pass.

        (n,) ``swapped``, of soft labels, are factors of the losses l(-u) of the other label.
        """


@dataclass(eq=False)
class StepPairs(ABC):
    """This rank's N pairs of an optimizer step, while the policy's parameters stay at omega.

    Iterating yields them by micro-batch, one at a time.

    Args:
        policy: at omega; it is not changed.
        objective: the per-pair loss l.
        batch: N pairs; reference log-probabilities that it lacks are computed.
        micro_batch_size: pairs of a forward pass, or a ``TokenBudget``; None for all pairs.
    """

    policy: PolicyModel
    objective: Objective
    batch: PairBatch
    micro_batch_size: MicroBatchSize

    def __post_init__(self) -> None:
        self.parts: list[tuple[PairBatch, Rows]] = []
        """By forward pass, with reference log-probabilities, and their rows."""
        for part in self.batch.micro_batches(self.micro_batch_size):
            rows = self.policy.rows(part)
            reference = self.policy.reference_log_probs(part, rows)
            self.parts.append((part.with_reference(reference), rows))

    @staticmethod
    def of(
        policy: PolicyModel,
        objective: Objective,
        batch: PairBatch,
        micro_batch_size: MicroBatchSize,
        *,
        keep: AskedGradients,
    ) -> StepPairs:
        """Return the pairs, with each pair's gradient kept if ``keep`` is true, or "auto" and memory allows.

        "auto" keeps none under ZeRO-3, or if a LoRA layer mixes rows, for which true raises
        UnsupportedLoraError.
        """
        options = policy, objective, batch, micro_batch_size
        if keep is True or (keep == "auto" and not policy.is_sharded and _affordable(policy, len(batch))):
            try:
                return KeptStepPairs(*options)
            except UnsupportedLoraError:
                if keep is True:
                    raise
        return RecomputedStepPairs(*options)

    @abstractmethod
    def __iter__(self) -> Iterator[Part]:
        """Yield the micro-batches, whose gradients may be added while they are at hand."""

    @abstractmethod
    def along(self, direction: Direction) -> Tensor:
        """Return (N,) direction . grad l_i, exactly; UnsupportedLoraError if a LoRA layer mixes rows."""

    @torch.no_grad()
    def weighted_losses(self) -> Tensor:
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
        with self.policy.single_gradients(rows, direction) as each, torch.enable_grad():
            rewards, losses = self.forward(part, rows)
            # Reaches all layers, and returns nothing.
            torch.autograd.grad(losses.sum(), [*self.policy.adapter().values()], allow_unused=True)
        return rewards.detach(), losses.detach(), each


@dataclass
class _LivePart(Part):
    pairs: StepPairs
    live: tuple[Rewards, Tensor]
    """Rewards and (n,) losses with their graph, which one call frees."""

    def add_gradient(self, total: Direction, factors: Tensor, swapped: Tensor | None = None) -> None:
        rewards, losses = self.live
        value = (factors * losses).sum()
        if swapped is not None:
            value = value + (swapped * self.pairs.objective(rewards.exchanged())).sum()
        self.pairs.policy.add_gradient(total, value)


class RecomputedStepPairs(StepPairs):
    """Runs the pairs again for each result."""

    def __iter__(self) -> Iterator[Part]:
        """One forward pass of each micro-batch, and one backward pass where its gradient is added."""
        for part, rows in self.parts:
            rewards, losses = self.forward(part, rows)
            yield _LivePart(part, rewards.detach(), losses.detach(), self, (rewards, losses))

    def along(self, direction: Direction) -> Tensor:
        """One forward and one backward pass; each pair's gradient is multiplied and dropped."""
        passes = (self.each_gradient(part, rows, direction) for part, rows in self.parts)
        return torch.cat([torch.stack([*dots.values()]).sum(0) for _, _, dots in passes])


@dataclass
class _KeptPart(Part):
    each: Direction
    """Each pair's gradient of l_i, (n, *shape) by parameter."""

    def add_gradient(self, total: Direction, factors: Tensor, swapped: Tensor | None = None) -> None:
        assert swapped is None, "a weighting that learns has no soft labels"
        for name, gradients in self.each.items():
            total[name] += torch.tensordot(factors.to(gradients.dtype), gradients, 1)


class KeptStepPairs(StepPairs):
    """Keeps each pair's gradient from one forward and one backward pass, for all results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept = [_KeptPart(part, *self.each_gradient(part, rows)) for part, rows in self.parts]

    def __iter__(self) -> Iterator[Part]:
        """No pass."""
        return iter(self.kept)

    def along(self, direction: Direction) -> Tensor:
        """Multiply the kept gradients."""
        dots = [[g.flatten(1) @ direction[name].flatten() for name, g in p.each.items()] for p in self.kept]
        return torch.cat([torch.stack(part).sum(0) for part in dots])


def _affordable(policy: PolicyModel, pairs: int) -> bool:
    """Return whether to keep each pair's gradient, the same on all ranks and in all steps but a GPU's first.

    A CPU's answer depends on its RAM, not on what is free, so that a run twice is the same bit for bit.
    """
    needed, device = 4 * pairs * sum(p.numel() for p in policy.adapter().values()), policy.device
    if needed > SMALL and policy.pair_memory is None:
        if device.type == "cuda":
            if not policy.has_stepped:  # its peak is not known
                return False
            # Bytes that neither others nor this process's largest step have taken.
            left = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
            room = int(FREE * (left - torch.cuda.max_memory_allocated(device)))
            of = f"{FREE:.0%} of what the largest step so far leaves free"
        else:
            room, of = int(RAM_SHARE * ram()) // ranks(), f"{RAM_SHARE:.1%} of the RAM by processes"
        policy.pair_memory = min_over_ranks(room, device)
        kept = needed <= policy.pair_memory
        rank_zero_info(
            f"keep_gradients auto is {str(kept).lower()}: the gradients of an update's pairs take "
            f"{needed / GIB:.3g} GiB, and they may take {policy.pair_memory / GIB:.3g} GiB ({of}); "
            f"overrule it by --model.weighting.keep_gradients {str(not kept).lower()}."
        )
    return needed <= max(SMALL, policy.pair_memory or 0)
