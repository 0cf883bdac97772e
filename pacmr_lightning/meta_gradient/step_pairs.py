"""A step's training pairs: rewards, losses and gradients at omega.

The virtual step, the coefficients and the policy's own gradient need the same pairs at the same omega. If
memory allows, each pair's gradient is kept from one pass for all three; else the pairs run again for each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..batch import MicroBatchSize, PairBatch
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
    each: Direction = field(default_factory=dict)
    """Gradients of l_i, (n, *shape) by parameter; or, as "e", their (n,) products with a direction."""


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
                self.kept = [self._run_for_each(*part) for part in self.parts]
            except UnsupportedLoraError:
                if self.keep is True:
                    raise

    def __iter__(self) -> Iterator[Part]:
        """Yield the micro-batches, one at a time; without kept gradients after a forward pass of each."""
        return iter(self.kept or (self._run(*part) for part in self.parts))

    def add_gradient(self, total: Direction, part: Part, factors: Tensor) -> None:
        """Add sum_i f_i grad l_i to this rank's ``total``, for (n,) factors; frees the part's graph."""
        if not part.each:
            self.policy.add_gradient(total, (factors * part.losses).sum())
            return
        for name, gradients in part.each.items():
            total[name] += torch.tensordot(factors.to(gradients.dtype), gradients, 1)

    def along(self, direction: Direction) -> Tensor:
        """Return (N,) direction . grad l_i, exactly; UnsupportedLoraError if a LoRA layer mixes rows.

        Kept gradients are multiplied; others in one forward and one backward pass, and dropped.
        """
        if self.kept is None:
            return torch.cat([self._run_for_each(*part, direction).each["e"] for part in self.parts])
        each = [part.each for part in self.kept]
        dots = [[g.flatten(1) @ direction[name].flatten() for name, g in part.items()] for part in each]
        return torch.cat([torch.stack(part).sum(0) for part in dots])

    @torch.no_grad()
    def current_losses(self) -> Tensor:
        """Return (N,) l_i at the policy's current parameters, also shifted ones, from a forward pass."""
        return torch.cat([self._run(*part).losses for part in self.parts])

    def _run(self, batch: PairBatch, rows: Rows) -> Part:
        """Run one of ``parts``, with its graph."""
        rewards = Rewards.of(self.policy.log_probs(batch, rows), batch, self.objective.beta)
        return Part(batch, rewards, self.objective(rewards))

    def _run_for_each(self, batch: PairBatch, rows: Rows, direction: Direction | None = None) -> Part:
        """Run one of ``parts`` for ``PolicyModel.single_gradients`` of l_i; no graph is left."""
        with self.policy.single_gradients(rows, direction) as leaves, torch.enable_grad():
            part = self._run(batch, rows)
            each = torch.autograd.grad(part.losses.sum(), [*leaves.values()], materialize_grads=True)
        return Part(batch, part.rewards.detach(), part.losses.detach(), dict(zip(leaves, each, strict=True)))


RecomputedStepPairs = StepPairs  # by its default, which keeps nothing
