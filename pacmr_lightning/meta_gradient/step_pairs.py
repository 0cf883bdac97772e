"""A step's training pairs at the policy's current parameters: rewards, losses and gradients.

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
from ..gradient import Direction, add_gradient
from ..objectives import Objective
from ..objectives.soft_labels import SoftLabelDifference
from ..policy import PolicyModel
from ..policy.lora_layer import PerPair, TokensOfPairs, UnsupportedLoraError
from ..policy.memory import ram
from ..policy.token_layout import Rows
from ..ranks import min_over_ranks, ranks
from ..rewards import Rewards
from ..strategies.sharding import shape

FREE = 0.8
"""Kept gradients' share of the memory that a GPU's largest step so far has left free."""
RAM_SHARE = 1 / 8
"""Kept gradients' share of the RAM, without a GPU."""
SMALL = 2**26
"""Bytes that kept gradients may always take."""
GIB = 2**30

AskedGradients = bool | Literal["auto"]
"""True to keep each pair's gradient; "auto" decides by memory."""
Take = Callable[[str, Tensor], None]
"""Called with an adapter parameter's name and its gradients of n pairs, (n, *shape)."""


@dataclass
class Part(ABC):
    """A micro-batch of n consecutive pairs of the step at omega; its values have no gradient."""

    batch: PairBatch
    rewards: Rewards
    losses: Tensor
    """(n,), before any weight."""
    place: slice

    @abstractmethod
    def add_gradient(self, total: Direction, factors: Tensor, rest_over: Tensor) -> None:
        """Add sum_i f_i grad l_i to this rank's ``total``, for (n,) factors; once for each pass.

        Under soft labels also the gradient of the losses without weight, divided by 0-dim ``rest_over``.
        """


@dataclass(eq=False)
class StepPairs(ABC):
    """This rank's N pairs of an optimizer step, while the policy's parameters stay at omega.

    Iterating yields them by micro-batch, one at a time.

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
    _seen: tuple[Rewards, Tensor] | None = field(default=None, init=False, repr=False)

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
    def rewards(self) -> Rewards:
        """Rewards of N pairs, detached, from the first pass over them."""
        return self._values()[0]

    @property
    def losses(self) -> Tensor:
        """(N,) losses before any weight, likewise."""
        return self._values()[1]

    @abstractmethod
    def __iter__(self) -> Iterator[Part]:
        """Yield the micro-batches, whose gradients may be added while they are at hand."""

    def _values(self) -> tuple[Rewards, Tensor]:
        if self._seen is None:
            with torch.no_grad():
                for _ in self:
                    pass
        assert self._seen is not None
        return self._seen

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


@dataclass
class _LivePart(Part):
    pairs: StepPairs
    live: Tensor
    """(n,) losses with their graph, which one call frees."""
    rest: Tensor | None
    """Likewise the losses without weight."""

    def add_gradient(self, total: Direction, factors: Tensor, rest_over: Tensor) -> None:
        value = (factors * self.live).sum()
        if self.rest is not None:
            value = value + self.rest.sum() / rest_over
        add_gradient(total, self.pairs.policy.adapter(), value)


@dataclass(eq=False)
class RecomputedStepPairs(StepPairs):
    """Runs the pairs again for each result; only rewards and losses are kept."""

    def __iter__(self) -> Iterator[Part]:
        """One forward pass of each micro-batch, and one backward pass where its gradient is added."""
        all_rewards, all_losses, done = [], [], 0
        for batch, rows in self.with_rows():
            rewards, losses = pair_losses(self.policy, self.objective, batch, rows)
            rest = None if self.soft is None else rest_losses(self.soft, rewards, batch)
            all_rewards.append(rewards.detach())
            all_losses.append(losses.detach())
            place = slice(done, done := done + len(batch))
            yield _LivePart(batch, all_rewards[-1], all_losses[-1], place, self, losses, rest)
        self._seen = self._seen or (Rewards.cat(all_rewards), torch.cat(all_losses))

    def along(self, direction: Direction) -> Tensor:
        """One forward and one backward pass; each pair's gradient is multiplied and dropped."""

        def dot(dots: list[Tensor], name: str, gradients: Tensor) -> None:
            dots.append(gradients.flatten(1) @ direction[name].flatten())

        parts = []
        for part, rows in self.with_rows():
            dots: list[Tensor] = []
            each_gradient(self.policy, self.objective, part, rows, partial(dot, dots))
            parts.append(torch.stack(dots).sum(0))
        return torch.cat(parts)


@dataclass
class _KeptPart(Part):
    each: Direction
    """Each pair's gradient, (n, *shape) by parameter."""
    rest: Direction
    """The gradient of the losses without weight; empty without soft labels."""

    def add_gradient(self, total: Direction, factors: Tensor, rest_over: Tensor) -> None:
        for name, gradients in self.each.items():
            total[name] += torch.tensordot(factors.to(gradients.dtype), gradients, 1)
        for name, gradient in self.rest.items():
            total[name] += gradient / rest_over


@dataclass(eq=False)
class KeptStepPairs(StepPairs):
    """Keeps each pair's gradient from one forward and one backward pass, for all results."""

    def __post_init__(self) -> None:
        def keep(each: Direction, name: str, gradients: Tensor) -> None:
            each[name] = each[name] + gradients if name in each else gradients

        self.parts: list[_KeptPart] = []
        done = 0
        for batch, rows in self.with_rows():
            each: Direction = {}
            rest: Direction = {}
            values = each_gradient(self.policy, self.objective, batch, rows, partial(keep, each), rest)
            each = {name: each[name] for name in self.policy.adapter()}
            place = slice(done, done := done + len(batch))
            self.parts.append(_KeptPart(batch, *values, place, each, rest))
        rewards = Rewards.cat([part.rewards for part in self.parts])
        self._seen = rewards, torch.cat([part.losses for part in self.parts])

    def __iter__(self) -> Iterator[Part]:
        """No pass."""
        return iter(self.parts)

    def along(self, direction: Direction) -> Tensor:
        """Multiply the kept gradients."""
        dots = [[g.flatten(1) @ direction[name].flatten() for name, g in p.each.items()] for p in self.parts]
        return torch.cat([torch.stack(part).sum(0) for part in dots])


def pair_losses(
    policy: PolicyModel,
    objective: Objective,
    batch: PairBatch,
    rows: Rows | None = None,
) -> tuple[Rewards, Tensor]:
    """Return rewards and (N,) losses of pairs with reference log-probabilities; dropped pairs have loss 0."""
    rewards = Rewards.of(policy.log_probs(batch, rows), batch, objective.beta)
    return rewards, _kept(objective, batch, objective(rewards))


def rest_losses(objective: SoftLabelDifference, rewards: Rewards, batch: PairBatch) -> Tensor:
    """Return the (N,) losses without weight under soft labels."""
    return _kept(objective, batch, objective.rest(rewards))


def _kept(objective: Objective, batch: PairBatch, losses: Tensor) -> Tensor:
    kept = objective.pair_weights(batch.ids)
    return losses if kept is None else losses * kept.to(losses)


def each_gradient(
    policy: PolicyModel,
    objective: Objective,
    batch: PairBatch,
    rows: Rows,
    take: Take,
    rest: Direction | None = None,
) -> tuple[Rewards, Tensor]:
    """Call ``take`` with every parameter's gradients by pair, from one forward and one backward pass.

    A layer that is used several times gives as many parts, an unused one zeros. ``rest``, under soft labels,
    gets the gradient of the sum of ``rest_losses`` from a second backward pass. Returns rewards and (n,)
    losses, detached. A LoRA layer that does not see whole rows raises UnsupportedLoraError.
    """
    parameters, layers = policy.adapter(), policy.lora_layers()
    tokens, unused = TokensOfPairs(rows.token_pair, len(batch)), set(parameters)

    def take_both(names: tuple[str, str], *gradients: Tensor) -> None:
        unused.difference_update(names)
        for name, gradient in zip(names, gradients, strict=True):
            take(name, gradient)

    def backward(losses: Tensor, again: bool = False) -> Direction:
        found = torch.autograd.grad(
            losses.sum(), [*parameters.values()], retain_graph=again, allow_unused=True
        )
        return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}

    try:
        for names, layer in layers.items():
            layer.per_pair = PerPair(tokens, partial(take_both, names))
        with torch.enable_grad():
            rewards, losses = pair_losses(policy, objective, batch, rows)
            soft = objective if rest is not None and isinstance(objective, SoftLabelDifference) else None
            backward(losses, again=soft is not None)  # reaches all layers, and returns nothing
            if rest is not None and soft is not None:
                tokens.apart = False
                rest |= backward(rest_losses(soft, rewards, batch))
    finally:
        for layer in layers.values():
            layer.per_pair = None
    for name in unused:
        take(name, parameters[name].new_zeros(len(batch), *shape(parameters[name])))
    return rewards.detach(), losses.detach()


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
