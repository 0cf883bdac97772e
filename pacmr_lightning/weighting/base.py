"""What every weighting offers to the module that uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import PairBatch
from ..rewards import Rewards
from .train_pairs import TrainPairs


@dataclass
class Weights:
    """Weights g of N pairs, with the slope and offset they came from where there are any. No gradient."""

    g: Tensor
    """(N,)"""
    a: Tensor | None = None
    """(N,)"""
    b: Tensor | None = None
    """(N,)"""

    @staticmethod
    def cat(parts: list[Weights]) -> Weights:
        """Joins consecutive micro-batches."""
        columns = ([getattr(p, name) for p in parts] for name in ("g", "a", "b"))
        return Weights(*(None if column[0] is None else torch.cat(column) for column in columns))


class Weighting(ABC):
    """How much each pair's loss counts.

    A weighting is no nn.Module: what it learns must not be cast, sharded or stepped together with the policy.
    """

    every: int | None = None
    """A weighting that learns does so at policy updates 0, every, 2 every, ...; else None."""
    vnet: nn.Module | None = None
    vnet_optimizer: torch.optim.Optimizer | None = None

    mean_one: bool = False
    """Whether the weights of an optimizer-step batch are divided by their mean over all ranks."""

    @abstractmethod
    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Weights of the batch's N pairs, from their detached rewards, before any division by their mean."""

    def set_label_noise(self, rate: float, uniform: bool = True) -> None:
        """Tells a weighting that depends on it the datamodule's noise rate, before training starts.

        Args:
            rate: share of the labels that are flipped.
            uniform: whether it is also every pair's own probability of a flip.
        """

    def check_pairs(self, pairs: Any) -> None:
        """Called before training with the datamodule's ``train_pairs``.

        Raises:
            UserError: the weighting does not fit them.
        """

    def check_sharded(self) -> None:
        """Called before training where ZeRO-3 keeps the policy's parameters in parts.

        Raises:
            UserError: ``update`` does not work with them.
        """

    def update(self, pairs: TrainPairs, meta: PairBatch, learning_rate: float) -> dict[str, Tensor]:
        """Learns from one train and one meta batch; returns 0-dim values to log, by name.

        The module calls it where ``every`` is set, before it asks for the weights of the same policy update.

        Args:
            pairs: this rank's train pairs at omega, with the policy, which must be left as it is, and the
                objective: their rewards, losses, weighted gradients, and products with a direction.
            meta: this rank's meta pairs.
            learning_rate: the policy's current learning rate.
        """
        raise NotImplementedError(f"{type(self).__name__} does not learn")

    def to(self, device: torch.device) -> None:
        """Moves what is learned to a device."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
