"""A step's training pairs at the policy's current parameters: rewards, losses, and sums of gradients.

A VNet update and the policy update that follows it need the same pairs at the same omega for three things:
the virtual step, the coefficients c_i, and the policy's own gradient. Where memory allows, each pair's
gradient is kept from one pass and serves all three (``kept_gradients``); else the pairs are run again for
each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..batch import PairBatch
from ..gradient import Direction, accumulated_gradient
from ..objectives import Objective
from ..objectives.soft_labels import SoftLabelDifference
from ..policy import PolicyModel
from ..policy.rows import Rows
from ..rewards import Rewards
from .pair_gradients import each_gradient, pair_losses, rest_losses


@dataclass
class SeenPairs:
    """n consecutive pairs of the batch, as a forward pass at omega found them. No gradient."""

    batch: PairBatch
    rewards: Rewards
    losses: Tensor
    """(n,) losses before any weight."""
    place: slice
    """Of the n pairs in the batch."""


Factors = Callable[[SeenPairs], Tensor]
"""(n,) factors of n pairs' losses: a pure function, called for all pairs at once or for some at a time."""


@dataclass(eq=False)
class TrainPairs(ABC):
    """This rank's N pairs of an optimizer step, while the policy's parameters stay at omega.

    Args:
        policy: at omega; nothing here changes it.
        objective: l, the per-pair loss; under soft labels ``SoftLabelDifference``, whose ``rest`` no weight
            multiplies.
        batch: N pairs, which bring their reference log-probabilities.
        micro_batch_size: pairs a forward pass may hold; None for all.
        entropies: whether ``rewards`` come with the policy's entropies.
    """

    policy: PolicyModel
    objective: Objective
    batch: PairBatch
    micro_batch_size: int | None
    entropies: bool = False
    _rows: list[Rows] | None = field(default=None, init=False, repr=False)
    """Kept without the batch, which may get other weights but no other tokens."""

    @property
    def soft(self) -> SoftLabelDifference | None:
        """The objective, where labels are soft."""
        return self.objective if isinstance(self.objective, SoftLabelDifference) else None

    @property
    @abstractmethod
    def rewards(self) -> Rewards:
        """Of N pairs, detached."""

    @property
    @abstractmethod
    def losses(self) -> Tensor:
        """(N,) losses before any weight, detached."""

    @abstractmethod
    def weighted(self, factors: Factors, rest_over: Tensor | None = None) -> Direction:
        """sum_i f_i grad l_i over the pairs of all ranks, which call it together.

        Args:
            factors: gives f.
            rest_over: 0-dim number by which the losses that no weight multiplies are divided, under soft
                labels; the gradient of their sum is added.
        """

    @abstractmethod
    def along(self, direction: Direction) -> Tensor:
        """(N,) direction . grad l_i, exactly.

        Raises:
            UserError: a LoRA layer does not see whole rows.
        """

    def micro_batches(self) -> list[PairBatch]:
        """The pairs in the parts that one forward pass holds."""
        return list(self.batch.micro_batches(self.micro_batch_size))

    def with_rows(self) -> Iterator[tuple[PairBatch, Rows]]:
        """``micro_batches`` and the rows of each, which all passes over the pairs share."""
        parts = self.micro_batches()
        if self._rows is None:
            self._rows = [self.policy.rows(part) for part in parts]
        return zip(parts, self._rows, strict=True)


class RecomputedPairs(TrainPairs):
    """Runs the pairs anew for each question; of a pass it keeps rewards and losses only."""

    _seen: list[SeenPairs] | None = None

    @property
    def rewards(self) -> Rewards:
        """Of the first pass; where none was made yet, of one without gradient."""
        return Rewards.cat([seen.rewards for seen in self._first_pass()])

    @property
    def losses(self) -> Tensor:
        """See ``rewards``."""
        return torch.cat([seen.losses for seen in self._first_pass()])

    @torch.no_grad()
    def _first_pass(self) -> list[SeenPairs]:
        if self._seen is None:
            self._seen = [seen for seen, *_ in self._passes()]
        return self._seen

    def _passes(self) -> Iterator[tuple[SeenPairs, Tensor, Rewards]]:
        """For each micro-batch what is seen of it, and its losses and rewards with their graph."""
        done = 0
        for part, rows in self.with_rows():
            rewards, losses = pair_losses(self.policy, self.objective, part, rows, self.entropies)
            place = slice(done, done + len(part))
            done = place.stop
            yield SeenPairs(part, rewards.detach(), losses.detach(), place), losses, rewards

    def weighted(self, factors: Factors, rest_over: Tensor | None = None) -> Direction:
        """One forward and one backward pass of each micro-batch."""
        found = []

        def sums() -> Iterator[Tensor]:
            for seen, losses, rewards in self._passes():
                found.append(seen)
                value = (factors(seen) * losses).sum()
                if self.soft is not None and rest_over is not None:
                    value = value + rest_losses(self.soft, rewards, seen.batch).sum() / rest_over
                yield value

        gradient = accumulated_gradient(self.policy.adapter(), sums())
        self._seen = self._seen or found
        return gradient

    def along(self, direction: Direction) -> Tensor:
        """One forward and one backward pass; a pair's gradient is multiplied with the direction and dropped.

        (Ghost clipping, arXiv 2110.05679, and in-run data Shapley, arXiv 2406.11011, avoid forming it; for
        matrices as narrow as LoRA's that is no less arithmetic.)
        """

        def dot(dots: list[Tensor], name: str, gradients: Tensor) -> None:
            dots.append(gradients.flatten(1) @ direction[name].flatten())

        parts = []
        for part, rows in self.with_rows():
            dots: list[Tensor] = []
            each_gradient(self.policy, self.objective, part, partial(dot, dots), rows=rows)
            parts.append(torch.stack(dots).sum(0))
        return torch.cat(parts)
