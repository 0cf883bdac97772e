"""What every weighting offers to the module that uses it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import PairBatch
from ..errors import UserError
from ..meta_gradient.step_pairs import StepPairs
from ..objectives import Objective
from ..rewards import Rewards


@dataclass
class Weights:
    """Weights g of N pairs, with the slope and offset they came from where there are any. No gradient."""

    g: Tensor
    """(N,)"""
    a: Tensor | None = None
    """(N,)"""
    b: Tensor | None = None
    """(N,)"""
    features: Tensor | None = None
    """(N, F) what a VNet of other features than (Delta, u) made them of, which ``VNetSurfaces`` needs."""

    @staticmethod
    def cat(parts: list[Weights]) -> Weights:
        """Joins consecutive micro-batches."""
        columns = ([getattr(p, name) for p in parts] for name in ("a", "b", "features"))
        return Weights(
            torch.cat([p.g for p in parts]),
            *(None if column[0] is None else torch.cat(column) for column in columns),
        )


class Weighting(ABC):
    """How much each pair's loss counts.

    A weighting is no nn.Module: what it learns must not be cast, sharded or stepped together with the policy.
    One that learns sets ``every``, defines ``update``, and keeps what it learned, which must be the same on
    all ranks, in ``state_dict``. The module calls ``to``, ``set_label_noise`` and ``check_pairs``
    before training, then ``load_state_dict`` where a run goes on, and then in each step on
    every rank ``update`` (where it is due) and ``weights``.
    """

    every: int | None = None
    """A weighting that learns does so at policy updates 0, every, 2 every, ...; else None. The command
    line tells it the datamodule: the constructor's option of this name, or else the class's value."""
    needs_meta: bool = True
    """Whether ``update`` looks at meta pairs. A class that does not sets it to False: the command line then
    asks the datamodule for none, and ``update`` gets an empty batch."""
    vnet: nn.Module | None = None
    """The network of a weighting that has one of the paper's kind, ``VNet``: features such as (Delta, u) to
    (g, a, b); ``VNetSurfaces`` draws it and ``pacmr export`` writes it. Others leave it at None."""
    vnet_optimizer: torch.optim.Optimizer | None = None
    """Its optimizer."""

    mean_one: bool = False
    """Whether the weights of an optimizer-step batch are divided by their mean over all ranks."""

    needs_entropies: bool = False
    """Whether ``weights`` looks at the policy's entropies, which cost a tensor of a chunk's logits."""
    looks_back: bool = False
    """Whether ``weights`` looks at earlier visits of a pair, which belong to the label that it had."""

    soft_labels: bool = False
    """Whether what a weight leaves of 1 goes to the pair's other label: the loss g l(u) + (1 - g) l(-u). For
    weights that are a probability that the label is right; a pair that is probably wrong then says what is
    probably right, where g l(u) throws that away."""

    @abstractmethod
    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Weights of N pairs under what is learned so far, before any division by their mean.

        A step calls it several times, for all of the rank's pairs at once or for some: what it gives a pair
        must depend neither on the other pairs nor on earlier calls.

        Args:
            rewards: of the N pairs at omega, detached.
            batch: the pairs.

        Returns:
            (N,) weights g on the rewards' device, without gradient, at least 0.
        """

    def set_label_noise(self, rate: float, uniform: bool = True) -> None:
        """Tells the datamodule's rate of flipped labels; ``uniform``: it is also each pair's probability."""

    def check_pairs(self, pairs: Any) -> None:
        """Raises UserError where the weighting does not fit the datamodule's ``train_pairs``."""

    def check_plan(self, updates: int, updates_per_epoch: int) -> None:
        """Raises UserError where the weighting needs a longer run."""

    def observe(self, rewards: Rewards, batch: PairBatch) -> None:
        """Sees this rank's N pairs of a step, detached, once its weights are made; all ranks call it."""

    def check_sharded(self) -> None:
        """Raises UserError where ``update`` cannot work with ZeRO-3's parts of parameters."""

    def update(self, pairs: StepPairs, meta: PairBatch, learning_rate: float) -> dict[str, Tensor]:
        """Learns from one train and one meta batch; returns 0-dim values to log, by name.

        The module calls it where ``every`` is set, by position and on every rank, before it asks for the
        weights of the same policy update. What is learned must stay the same on all ranks: values and
        gradients that were found from this rank's pairs go through ``ranks.sum_over_ranks`` first.

        Args:
            pairs: this rank's N train pairs at omega, with the policy, which must be left as it is, and the
                objective. ``rewards`` and ``losses`` are detached (N,) values, ``weighted(factors)`` is the
                gradient of the weighted sum of losses over all ranks, ``along(direction)`` the (N,) products
                of each pair's gradient with a direction.
            meta: this rank's M meta pairs, none without ``needs_meta``.
                ``policy.reference_log_probs(meta)`` are their reference's, and ``meta.augmented`` their
                second views where they are reworded training pairs, else None. Run no more than
                ``pairs.micro_batch_size`` of them at once.
            learning_rate: the policy's current learning rate.

        Returns:
            Finite values on the policy's device without gradient, logged as ``train/<name>``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not learn")

    def to(self, device: torch.device) -> None:
        """Moves what is learned to a device, before it is restored and before its optimizer has any state."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep: tensors, numbers, strings, and lists and dicts of these.

        Its keys are always the same. Rank 0's is kept, and all ranks go on with it.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""


def check_soft_labels(weighting: Weighting, objective: Objective) -> None:
    """Refuses soft labels with an objective that corrects labels itself, and with weights of mean one."""
    if not weighting.soft_labels:
        return
    if objective.corrects_labels:
        raise UserError(
            f"{type(weighting).__name__} has soft_labels, but {type(objective).__name__} holds labels wrong "
            "with some probability itself, which would correct for them twice; use DPO or IPO, or set "
            "soft_labels to false."
        )
    if weighting.mean_one:
        raise UserError(
            "soft_labels and mean_one are both set, but a weight that is divided by the mean is no "
            "probability any more; take one of them out."
        )


def check_update(weighting: Weighting) -> None:
    """Refuses a weighting that learns by an ``update`` of other arguments than the module calls it with."""
    if not weighting.every:
        return
    try:
        inspect.signature(weighting.update).bind("pairs", "meta", 0.0)
    except TypeError as error:
        raise UserError(
            f"{type(weighting).__name__}.update is called with pairs, meta and learning_rate, but takes "
            f"other arguments ({error}); define it as Weighting.update is."
        ) from None
