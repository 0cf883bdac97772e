"""A step's training pairs at the policy's current parameters: rewards, losses, and sums of gradients.

The virtual step, the coefficients c_i and the policy's own gradient need the same pairs at the same omega. If
memory allows, each pair's gradient is kept from one pass for all three; else the pairs run again for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ..batch import MicroBatchSize, PairBatch
from ..gradient import Direction, accumulated_gradient
from ..memory import ram
from ..objectives import Objective
from ..objectives.soft_labels import SoftLabelDifference
from ..policy import PolicyModel
from ..policy.lora_layer import UnsupportedLoraError
from ..policy.token_layout import Rows
from ..ranks import min_over_ranks, ranks, sum_over_ranks
from ..rewards import Rewards
from .per_pair_gradients import each_gradient, pair_losses, rest_losses

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
class PairLosses:
    """Rewards and losses of n consecutive pairs of the batch at omega, without gradient."""

    batch: PairBatch
    rewards: Rewards
    losses: Tensor
    """(n,), before any weight."""
    place: slice


Factors = Callable[[PairLosses], Tensor]
"""(n,) factors of n pairs' losses: a pure function, called for all pairs at once or for some."""


@dataclass(eq=False)
class StepPairs(ABC):
    """This rank's N pairs of an optimizer step, while the policy's parameters stay at omega.

    Args:
        policy: at omega; it is not changed.
        objective: the per-pair loss l; for soft labels ``SoftLabelDifference``, whose ``rest`` has no weight.
        batch: N pairs with reference log-probabilities.
        micro_batch_size: pairs of a forward pass, or a ``TokenBudget``; None for all pairs.
    """

    policy: PolicyModel
    objective: Objective
    batch: PairBatch
    micro_batch_size: MicroBatchSize
    _rows: list[Rows] | None = field(default=None, init=False, repr=False)

    @staticmethod
    def of(
        policy: PolicyModel,
        objective: Objective,
        batch: PairBatch,
        micro_batch_size: MicroBatchSize,
        *,
        keep: AskedGradients,
        soft_labels: bool = False,
    ) -> StepPairs:
        """Return the pairs, with each pair's gradient kept if ``keep`` is true, or "auto" and memory allows.

        "auto" keeps none under ZeRO-3, or if a LoRA layer mixes rows. ``soft_labels``: loss g l(u) +
        (1 - g) l(-u).

        Raises:
            UnsupportedLoraError: ``keep`` is true, and a LoRA layer mixes rows.
        """
        if soft_labels:
            objective = SoftLabelDifference(objective)
        if keep is True or (keep == "auto" and not policy.is_sharded and _affordable(policy, len(batch))):
            try:
                return KeptStepPairs(policy, objective, batch, micro_batch_size)
            except UnsupportedLoraError:
                if keep is True:
                    raise
        return RecomputedStepPairs(policy, objective, batch, micro_batch_size)

    @property
    def soft(self) -> SoftLabelDifference | None:
        """The objective, if labels are soft."""
        return self.objective if isinstance(self.objective, SoftLabelDifference) else None

    @property
    @abstractmethod
    def rewards(self) -> Rewards:
        """Rewards of N pairs, detached."""

    @property
    @abstractmethod
    def losses(self) -> Tensor:
        """(N,) losses before any weight, detached."""

    @abstractmethod
    def weighted(self, factors: Factors, rest_over: Tensor | None = None) -> Direction:
        """Return sum_i f_i grad l_i over the pairs of all ranks; all ranks call it.

        Under soft labels the gradient of the losses without weight, divided by 0-dim ``rest_over``, is added.
        """

    @abstractmethod
    def along(self, direction: Direction) -> Tensor:
        """Return (N,) direction . grad l_i, exactly.

        Raises:
            UserError: a LoRA layer does not see whole rows.
        """

    def micro_batches(self) -> list[PairBatch]:
        """Return the pairs by forward pass."""
        return list(self.batch.micro_batches(self.micro_batch_size))

    def with_rows(self) -> Iterator[tuple[PairBatch, Rows]]:
        """Yield ``micro_batches`` with the rows of each, made once."""
        parts = self.micro_batches()
        if self._rows is None:
            self._rows = [self.policy.rows(part) for part in parts]
        return zip(parts, self._rows, strict=True)


class RecomputedStepPairs(StepPairs):
    """Runs the pairs again for each result; only rewards and losses are kept."""

    _seen: list[PairLosses] | None = None

    @property
    def rewards(self) -> Rewards:
        """Rewards of the first pass."""
        return Rewards.cat([seen.rewards for seen in self._first_pass()])

    @property
    def losses(self) -> Tensor:
        """Losses of the first pass."""
        return torch.cat([seen.losses for seen in self._first_pass()])

    @torch.no_grad()
    def _first_pass(self) -> list[PairLosses]:
        if self._seen is None:
            self._seen = [seen for seen, *_ in self._passes()]
        return self._seen

    def _passes(self) -> Iterator[tuple[PairLosses, Tensor, Rewards]]:
        """Yield each micro-batch detached, and its losses and rewards with their graph."""
        done = 0
        for part, rows in self.with_rows():
            rewards, losses = pair_losses(self.policy, self.objective, part, rows)
            place = slice(done, done + len(part))
            done = place.stop
            yield PairLosses(part, rewards.detach(), losses.detach(), place), losses, rewards

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
        """One forward and one backward pass; each pair's gradient is multiplied and dropped."""

        def dot(dots: list[Tensor], name: str, gradients: Tensor) -> None:
            dots.append(gradients.flatten(1) @ direction[name].flatten())

        parts = []
        for part, rows in self.with_rows():
            dots: list[Tensor] = []
            each_gradient(self.policy, self.objective, part, partial(dot, dots), rows=rows)
            parts.append(torch.stack(dots).sum(0))
        return torch.cat(parts)


@dataclass(eq=False)
class KeptStepPairs(StepPairs):
    """Keeps each pair's gradient from one forward and one backward pass, for all results."""

    def __post_init__(self) -> None:
        def keep(kept: Direction, name: str, gradients: Tensor) -> None:
            kept[name] = kept[name] + gradients if name in kept else gradients

        def add(name: str, gradients: Tensor) -> None:
            keep(self._rest, name, gradients.sum(0))

        rewards, losses = [], []
        self._rest: Direction = {}
        self.parts: list[Direction] = []
        """Gradients of each micro-batch of n pairs, (n, *shape) by parameter."""
        for part, rows in self.with_rows():
            kept: Direction = {}
            rest = None if self.soft is None else add
            found, loss = each_gradient(self.policy, self.objective, part, partial(keep, kept), rest, rows)
            rewards.append(found)
            losses.append(loss)
            self.parts.append({name: kept[name] for name in self.policy.adapter()})
        self._rewards, self._losses = Rewards.cat(rewards), torch.cat(losses)

    @property
    def rewards(self) -> Rewards:
        """Rewards of N pairs, detached."""
        return self._rewards

    @property
    def losses(self) -> Tensor:
        """(N,) losses before any weight, detached."""
        return self._losses

    def weighted(self, factors: Factors, rest_over: Tensor | None = None) -> Direction:
        """Multiply the kept gradients."""
        f = factors(PairLosses(self.batch, self._rewards, self._losses, slice(0, len(self.batch))))
        total: Direction = {}
        done = 0
        for part in self.parts:
            size = len(next(iter(part.values())))
            rows = f[done : done + size]
            done += size
            for name, gradients in part.items():
                found = torch.tensordot(rows.to(gradients.dtype), gradients, 1)
                total[name] = total[name].add_(found) if name in total else found
        if rest_over is not None:
            for name, gradient in self._rest.items():
                total[name].add_(gradient / rest_over)
        sum_over_ranks(total.values())
        return total

    def along(self, direction: Direction) -> Tensor:
        """Multiply the kept gradients."""
        dots = [[g.flatten(1) @ direction[name].flatten() for name, g in p.items()] for p in self.parts]
        return torch.cat([torch.stack(part).sum(0) for part in dots])


def _affordable(policy: PolicyModel, pairs: int) -> bool:
    """Return whether to keep each pair's gradient, the same on all ranks and in all steps but a GPU's first.

    Printed where they are large. A CPU's answer depends on its RAM, not on what is free, so that the same
    run twice is the same bit for bit.
    """
    needed, device = 4 * pairs * sum(p.numel() for p in policy.adapter().values()), policy.device
    if needed > SMALL and policy.pair_memory is None:
        if device.type == "cuda":
            if not policy.has_stepped:  # its peak is not known
                return False
            room = int(FREE * _left_free(device))
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


def _left_free(device: torch.device) -> int:
    """Bytes that neither others nor this process's largest step have taken."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
