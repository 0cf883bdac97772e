"""Each pair's own gradient, kept from one pass where memory allows, for all that a step asks of its pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from ..batch import PairBatch
from ..gradient import Direction
from ..objectives import Objective
from ..objectives.soft_labels import SoftLabelDifference
from ..policy import PolicyModel
from ..policy.lora import UnhookedLoraError
from ..ranks import sum_over_ranks
from ..rewards import Rewards
from .pair_gradients import each_gradient
from .train_pairs import Factors, RecomputedPairs, SeenPairs, TrainPairs

SHARE = 1 / 8
"""Of the memory that a plain step holds anyway: what kept gradients may add."""
FREE = 0.8
"""Of the memory that a GPU's largest step so far has left free: what kept gradients may take there."""
SMALL = 2**26
"""Bytes that they may take whatever else is held."""


@dataclass(eq=False)
class KeptGradients(TrainPairs):
    """Each pair's own gradient from one forward and one backward pass: whatever is asked then runs nothing.

    Raises:
        UnhookedLoraError: see ``each_gradient``.
    """

    def __post_init__(self) -> None:
        def keep(kept: Direction, name: str, gradients: Tensor) -> None:
            kept[name] = kept[name] + gradients if name in kept else gradients

        def add(name: str, gradients: Tensor) -> None:
            total = gradients.sum(0)
            self._rest[name] = self._rest[name] + total if name in self._rest else total

        rewards, losses = [], []
        self._rest: Direction = {}
        """Under soft labels the gradient of the sum of the losses that no weight multiplies."""
        self.parts: list[Direction] = []
        """For each micro-batch of n pairs the gradients of their losses, (n, *shape) by parameter."""
        for part, rows in self.with_rows():
            kept: Direction = {}
            rest = None if self.soft is None else add
            found, loss = each_gradient(
                self.policy, self.objective, part, partial(keep, kept), rest, self.entropies, rows
            )
            rewards.append(found)
            losses.append(loss)
            self.parts.append({name: kept[name] for name in self.policy.adapter()})
        self._rewards, self._losses = Rewards.cat(rewards), torch.cat(losses)

    @property
    def rewards(self) -> Rewards:
        """Of N pairs, detached."""
        return self._rewards

    @property
    def losses(self) -> Tensor:
        """(N,) losses before any weight, detached."""
        return self._losses

    def weighted(self, factors: Factors, rest_over: Tensor | None = None) -> Direction:
        """A product with the kept gradients."""
        all_of_them = slice(0, len(self.batch))
        f = factors(SeenPairs(self.batch, self._rewards, self._losses, all_of_them))
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
        """A product with the kept gradients."""
        dots = [[g.flatten(1) @ direction[name].flatten() for name, g in p.items()] for p in self.parts]
        return torch.cat([torch.stack(part).sum(0) for part in dots])


def train_pairs(
    policy: PolicyModel,
    objective: Objective,
    batch: PairBatch,
    micro_batch_size: int | None,
    *,
    often: bool,
    soft_labels: bool = False,
    entropies: bool = False,
) -> TrainPairs:
    """The pairs in the form that suits what a step does with them.

    Args:
        policy: see ``TrainPairs``.
        objective: the per-pair loss.
        batch: see ``TrainPairs``.
        micro_batch_size: see ``TrainPairs``.
        often: the step needs them for more than its own gradient, so that keeping each pair's gradient pays.
            They are not kept all the same where a LoRA layer mixes rows, where they would take much of the
            memory beside the base and one micro-batch's activations (on a GPU: of what a step leaves free),
            and under ZeRO-3, which puts parameters away to save memory.
        soft_labels: what a weight leaves of 1 goes to the pair's other label.
        entropies: see ``TrainPairs``.
    """
    if soft_labels:
        objective = SoftLabelDifference(objective)
    if often and not policy.is_sharded and _affordable(policy, batch, micro_batch_size):
        try:
            return KeptGradients(policy, objective, batch, micro_batch_size, entropies)
        except UnhookedLoraError:
            pass
    return RecomputedPairs(policy, objective, batch, micro_batch_size, entropies)


def _affordable(policy: PolicyModel, batch: PairBatch, micro_batch_size: int | None) -> bool:
    """Return whether a VNet update keeps each pair's gradient; printed if they are large."""
    adapter = sum(p.numel() for p in policy.adapter().values())
    held = sum(p.numel() * p.element_size() for p in policy.parameters())
    if not policy.gradient_checkpointing:
        tokens = batch.input_ids[:micro_batch_size].numel()
        held += kept_inputs(policy.lora_linears(), tokens)
    needed = 4 * len(batch) * adapter
    kept, room = affordable(len(batch), adapter, held), ""
    if not kept and policy.device.type == "cuda":
        if policy.left_free is None and policy.has_stepped:
            policy.left_free = _left_free(policy.device)
        if policy.left_free is None:  # what a step needs is not known yet
            return False
        kept = needed <= FREE * policy.left_free
        room = f"; a step leaves {policy.left_free / 2**30:.1f} GiB free"
    if needed > SMALL and kept != policy.keeps_gradients:
        policy.keeps_gradients = kept
        rank_zero_info(
            f"VNet's updates {'keep each' if kept else 'recompute each'} pair's gradient "
            f"({needed / 2**30:.1f} GiB{room})."
        )
    return kept


def _left_free(device: torch.device) -> int:
    """Bytes of a GPU that neither others nor this process's largest step so far have taken."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


def affordable(pairs: int, adapter: int, held: float) -> bool:
    """Whether pairs' gradients of an adapter are small beside ``held``: base, adapter and ``kept_inputs``."""
    return 4 * pairs * adapter <= max(SMALL, SHARE * held)


def kept_inputs(linears: Mapping[str, nn.Linear], tokens: int) -> int:
    """Bytes of what LoRA layers keep of their inputs, in fp32, where activations are not computed again."""
    return 4 * tokens * sum(linear.in_features for linear in linears.values())
