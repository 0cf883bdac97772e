"""Base class of weightings, and the weight 1."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import PairBatch
from ..errors import UserError
from ..meta_gradient.step_pairs import AskedGradients, StepPairs
from ..objectives import Objective
from ..rewards import Rewards, Weights
from ..stateful import Stateful


class Weighting(Stateful, ABC):
    """Base class: a weight for each pair's loss.

    No nn.Module, since what it learns must not be cast, sharded or stepped with the policy. One that learns
    sets ``every``, defines ``update``, and returns its state, the same on all ranks, from ``state_dict``. The
    module calls ``to``, ``set_label_noise`` and ``check_pairs`` before training, then ``load_state_dict`` on
    resuming, and in each step on every rank ``update`` (if due) and ``weights``.
    """

    every: int | None = None
    """A weighting that learns does so at policy updates 0, every, 2 every, ...; else None.

    The command line passes the constructor's option of this name, or the class's value, to the datamodule.
    """
    needs_meta: bool = True
    """If true, ``update`` uses a meta-batch; else the datamodule gives none."""
    vnet: nn.Module | None = None
    """The network that learns, if any; ``pacmr export`` writes a ``VNet``."""
    vnet_optimizer: torch.optim.Optimizer | None = None
    updates: int = 0
    """Updates of ``vnet`` in this fit, for the logs."""
    skipped: int = 0

    keep_gradients: AskedGradients = "auto"
    """If true, each pair's gradient is kept in steps with an ``update``."""

    columns: tuple[str, ...] = ()
    """Columns of the rows, of ``TokenizedPairs.own_columns``, that the weights come from."""

    soft_labels: bool = False
    """If True: loss g l(u) + (1 - g) l(-u), for weights that are probabilities of a right label; not with
    ``every``."""

    @abstractmethod
    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Return weights of N pairs under the current state.

        A step calls it several times, for all of the rank's pairs or some: a pair's weight must depend
        neither on other pairs nor on earlier calls.

        Args:
            rewards: of the N pairs at omega, detached.
            batch: the pairs.

        Returns:
            (N,) weights g on the rewards' device, without gradient, at least 0.
        """

    def set_label_noise(self, rate: float, uniform: bool = True) -> None:
        """Receive the datamodule's noise rate; ``uniform``: it is each pair's flip probability."""

    def check_pairs(self, pairs: Any) -> None:
        """Raise a UserError if the weighting does not fit the datamodule's ``train_pairs``."""

    def check_plan(self, updates: int, updates_per_epoch: int) -> None:
        """Raise a UserError if the weighting needs a longer run."""

    def observe(self, rewards: Rewards, batch: PairBatch) -> None:
        """Receive this rank's N pairs after each step's weights, detached; all ranks call it."""

    def check_sharded(self) -> None:
        """Raise a UserError if ``update`` cannot work with ZeRO-3's sharded parameters."""

    def update(
        self, pairs: StepPairs, meta: PairBatch, learning_rate: float, peak: float
    ) -> dict[str, Tensor]:
        """Learn from one train and one meta batch; return 0-dim values to log, by name.

        Called if ``every`` is set, by position and on every rank, before the weights of the same policy
        update. The state must stay the same on all ranks: sum values and gradients of this rank's pairs with
        ``ranks.sum_over_ranks`` first.

        Args:
            pairs: this rank's N train pairs at omega, with the objective and the policy, which must not
                change. ``algorithm_1.weighted_gradient`` has their rewards, losses and the weighted gradient
                over all ranks, ``pairs.along(direction)`` the (N,) products of each pair's gradient with a
                direction.
            meta: this rank's meta-batch of M pairs, none without ``needs_meta``;
                ``policy.reference_log_probs(meta)`` are their reference's. ``meta.augmented`` are training
                pairs under augmented prompts, else None. Run at most ``pairs.micro_batch_size`` of them at
                once.
            learning_rate: the policy's current learning rate.
            peak: the largest of its schedule, the module's ``learning_rate``.

        Returns:
            Finite values on the policy's device without gradient, logged as ``train/<name>``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not learn")

    def to(self, device: torch.device) -> None:
        """Move the state to a device, before it is restored and before its optimizer has any state."""


class Unweighted(Weighting):
    """Weight 1 for every pair: plain DPO."""

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Return (N,) ones."""
        return Weights(torch.ones_like(rewards.u))


def check_soft_labels(weighting: Weighting, objective: Objective) -> None:
    """Refuse soft labels of a weighting that learns, or with an objective that corrects labels itself."""
    if not weighting.soft_labels:
        return
    if objective.corrects_labels:
        raise UserError(
            f"{type(weighting).__name__} has soft_labels, but {type(objective).__name__} models label "
            "noise itself, so labels would be corrected twice; use DPO or IPO, or set "
            "soft_labels to false."
        )
    if weighting.every is not None:
        raise UserError(
            f"{type(weighting).__name__} has soft_labels, but learns at every {weighting.every} updates, "
            "which is for weights alone; set soft_labels to false."
        )


def unused_columns(weighting: Weighting, pairs: Any) -> Iterator[str]:
    """Yield sentences on weights, votes and ties of training pairs that a weighting does not use."""
    name = type(weighting).__name__
    ties, counted = pairs.ties, [number is not None for number in pairs.rows["votes_for"][:]]
    others = [column for column in pairs.own_columns if column not in weighting.columns]
    if "votes_for" in others and ties[counted].all():
        others.remove("votes_for")
    if others:
        does = "own_weights" if others == ["weight"] else "soft_labels"
        more = "" if weighting.columns else f"; the method {does} does"
        yield f"{name} does not use the column {' or '.join(others)} of the rows{more}."
    if ties.any() and not weighting.soft_labels:
        yield (
            f"{ties.sum():,} of {len(pairs):,} labels are ties, from which {name} learns that chosen is "
            "better; remove them, or take the method soft_labels, which counts them as one half."
        )
