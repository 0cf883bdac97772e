"""Base class of preference objectives."""

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import check_within
from ..rewards import Rewards
from ..stateful import Stateful
from ..strategies.ranks import sum_over_ranks


class Objective(Stateful, ABC):
    """A preference loss with one value per pair; the weighting multiplies it, the module averages it.

    A plain loss needs only ``__call__``. Override other methods to weigh pairs against each other
    (``grouped``) or learn from each step (``observe``). Before training come ``check_pairs``,
    ``resolve_label_noise`` if "auto", and ``load_state_dict`` if resumed; in each step ``__call__`` several
    times per micro-batch, then ``observe`` and the group's methods once with all of this rank's pairs.

    Args:
        beta: DPO temperature, which scales log(pi / pi_ref) to implicit rewards; above 0.

    Raises:
        UserError: an argument is out of its range, also in subclasses.
    """

    grouped: bool = False
    """If true, ``group_weights`` replaces the plain mean over pairs."""
    holds_factors: bool = False
    """True if detached factors depend on omega, so that differences do not estimate the gradient."""
    corrects_labels: bool = False
    """True if the loss models label noise itself, so that soft labels would correct twice."""
    label_noise: float | Literal["auto"] | None = None
    """Assumed noise rate; "auto" until ``resolve_label_noise``, None if the loss has none."""
    asked_label_noise: float | Literal["auto"] | None = None
    """``label_noise`` as given; "auto" is resolved anew in each fit."""

    def __init__(self, beta: float = 0.1):
        check_within("(0, 1e30]", " (usual: 0.1)", beta=beta)
        self.beta = beta

    @abstractmethod
    def __call__(self, rewards: Rewards) -> Tensor:
        """Return (N,) losses of separate pairs; raises UserError if ``label_noise`` is still "auto".

        Args:
            rewards: u, Delta, h and log-probabilities of N pairs, with gradient where the step needs one.
        """

    def group_weights(self, losses: Tensor) -> Tensor:
        """Return (N,) weights of this rank's detached losses that sum to 1 over all ranks, if ``grouped``.

        The weighted sum of losses has the gradient of the step's loss. Every rank calls it with all of its
        pairs.
        """
        raise NotImplementedError(f"{type(self).__name__} is not grouped")

    def group_value(self, losses: Tensor) -> Tensor:
        """Return the 0-dim step's loss over all ranks; by default the plain mean."""
        sums = torch.stack([losses.sum(), losses.new_tensor(len(losses))])
        sum_over_ranks([sums])
        return sums[0] / sums[1]

    def observe(self, rewards: Rewards, ids: list[str]) -> None:
        """Observe this rank's N pairs, detached, once per step; state must be the same on all ranks."""

    def learned(self) -> dict[str, float]:
        """Return learned values by name, for curves and summary."""
        return {}

    def check_pairs(self, pairs: Any) -> None:
        """Check ``train_pairs`` (of all ranks) before training; raises UserError if they do not fit."""

    def resolve_label_noise(self, rate: float) -> None:
        """Set a ``label_noise`` of "auto" to the data's; raises UserError if it is out of range."""
        raise NotImplementedError(f"{type(self).__name__} has no label_noise")
