"""What every preference objective offers: a loss for each pair, and how a step reduces them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import UserError
from ..ranks import sum_over_ranks
from ..rewards import Rewards


class Objective(ABC):
    """A preference loss, one value a pair; the weighting multiplies it, the module averages it.

    ``__call__`` is all that a loss needs. The other methods have neutral defaults. They are for objectives
    that weigh the pairs of a batch against each other (``grouped``), drop pairs (``pair_weights``) or learn
    something from every step (``observe``). Before training come ``check_pairs``, ``resolve_label_noise``
    where ``label_noise`` is "auto", ``load_state_dict`` where a run goes on, and ``check_plan``; in each step
    ``__call__`` and ``pair_weights`` for each micro-batch, several times over, then ``observe`` and the
    group's methods, once each, with all of this rank's pairs.

    Args:
        beta: DPO temperature, which scales log(pi / pi_ref) to implicit rewards; above 0.

    Raises:
        UserError: beta is not above 0, or infinite.
    """

    grouped: bool = False
    """Whether ``group_weights`` takes the place of the plain mean over pairs."""
    holds_factors: bool = False
    """Whether the loss holds factors fixed that depend on omega, so that differences of its values do not
    estimate its gradient."""
    corrects_labels: bool = False
    """Whether the loss holds a label wrong with some probability itself, so that soft labels would correct
    for wrong labels a second time."""
    kept: tuple[str, ...] = ()
    """Names of the attributes that a checkpoint keeps: plain numbers, strings, lists and dicts, the same on
    all ranks."""
    label_noise: float | Literal["auto"] | None = None
    """The flip rate that the loss is told; "auto" until ``resolve_label_noise``, None where it has none."""

    def __init__(self, beta: float = 0.1):
        if not 0 < beta < math.inf:
            raise UserError(f"beta is {beta}, but it must be above 0 and finite (the paper uses 0.1).")
        self.beta = beta

    @abstractmethod
    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced, each of which depends on its own pair only.

        Args:
            rewards: of N pairs: u, Delta, h and the log-probabilities that they are made of. Those of the
                policy carry the gradient where the step needs one.

        Raises:
            UserError: ``label_noise`` is "auto" and nobody resolved it.
        """

    def group_weights(self, losses: Tensor, micro_batch_size: int | None = None) -> Tensor | None:
        """Weights whose weighted sum of losses over all ranks has the gradient of the step's loss.

        Every rank must call it, with all of its pairs of the optimizer step at once.

        Args:
            losses: (N,) losses of this rank, detached.
            micro_batch_size: how the module cuts them into micro-batches; None for one.

        Returns:
            (N,) weights that sum to 1 over all ranks; None where the step's loss is the plain mean.
        """
        return None

    def group_value(self, losses: Tensor, micro_batch_size: int | None = None) -> Tensor:
        """0-dim value of the step's loss over all ranks, from the same arguments; here the plain mean."""
        sums = torch.stack([losses.sum(), losses.new_tensor(len(losses))])
        sum_over_ranks([sums])
        return sums[0] / sums[1]

    def pair_weights(self, ids: list[str]) -> Tensor | None:
        """(N,) fp32 factors of these pairs' losses, on the CPU: 0 drops a pair. None: all are 1."""
        return None

    def observe(self, rewards: Rewards, ids: list[str]) -> None:
        """Sees this rank's N pairs of an optimizer step, detached, when all of its losses are computed.

        Every rank calls it once a step; what is learned is the same on all of them.
        """

    def learned(self) -> dict[str, float]:
        """Numbers that it has learned so far, by name, for a run's curves and its summary."""
        return {}

    def check_pairs(self, pairs: Any) -> None:
        """Called before training, on every rank, with the datamodule's ``train_pairs`` (of all ranks).

        Raises:
            UserError: the objective does not fit them.
        """

    def check_plan(self, updates: int, updates_per_epoch: int) -> None:
        """Looks at the length of a run before it starts.

        Raises:
            UserError: an option would do nothing in so short a run.
        """

    def resolve_label_noise(self, rate: float) -> None:
        """Sets a ``label_noise`` that is "auto"; the number that is there may be given again.

        Raises:
            UserError: the objective has no ``label_noise``, has another number, or cannot take this one.
        """
        raise UserError(
            f"{type(self).__name__} has no label_noise to set to {rate}; choose CDPO or RDPO instead."
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep: the attributes that ``kept`` names."""
        return {name: copy(getattr(self, name)) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned.

        Raises:
            UserError: it is the state of an objective of another kind.
        """
        if state.keys() != self.state_dict().keys():
            raise UserError(
                f"The checkpoint's objective kept {sorted(state)}, but {type(self).__name__} keeps "
                f"{sorted(self.state_dict())}; resume with the objective that the run had."
            )
        for name in self.kept:
            setattr(self, name, copy(state[name]))
