"""Objectives with a rate of flipped labels: told to cDPO and rDPO, estimated along the way by RE-PO (EM).

u is the implicit reward difference beta h, ls is logsigmoid.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..ranks import sum_over_ranks
from ..rewards import Rewards
from .base import Objective


class LabelNoiseObjective(Objective):
    """A loss that is told the rate of flipped labels.

    Args:
        beta: see ``Objective``.
        label_noise: the rate, in [0, 0.5); "auto" leaves it to ``resolve_label_noise``.
    """

    corrects_labels = True
    label_noise: float | Literal["auto"]

    def __init__(self, beta: float = 0.1, label_noise: float | Literal["auto"] = "auto"):
        super().__init__(beta)
        if label_noise != "auto":
            self._check_label_noise(label_noise)
        self.label_noise = label_noise

    def _check_label_noise(self, rate: float) -> None:
        if not 0 <= rate < 0.5:
            raise UserError(
                f"label_noise is {rate}, but {type(self).__name__} needs a rate from 0 to below 0.5; at 0.5 "
                "labels say nothing, above it exchange chosen and rejected."
            )

    def resolve_label_noise(self, rate: float) -> None:
        """See ``Objective``."""
        if self.label_noise not in ("auto", rate):
            raise UserError(
                f"label_noise is {self.label_noise} already and cannot become {rate}; make it auto to take "
                "the data's rate."
            )
        self._check_label_noise(rate)
        self.label_noise = rate

    @property
    def rate(self) -> float:
        """``label_noise`` as a number.

        Raises:
            UserError: it is still "auto".
        """
        if self.label_noise == "auto":
            raise UserError(
                f"{type(self).__name__}'s label_noise is auto, but there is no noise rate to take it from; "
                "give it as a number."
            )
        return self.label_noise

    def state_dict(self) -> dict[str, Any]:
        """The rate, which "auto" may have set."""
        return {"label_noise": self.label_noise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the rate over where it is still "auto" here."""
        super().load_state_dict(state)
        if self.label_noise == "auto" and state["label_noise"] != "auto":
            self.resolve_label_noise(state["label_noise"])


class CDPO(LabelNoiseObjective):
    """Conservative DPO, label smoothing: -(1 - eps) ls(u) - eps ls(-u); eps is ``label_noise``.

    Smallest where sigmoid(u) = 1 - eps. (Mitchell, "A note on DPO with noisy preferences", 2023.)
    """

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        u, eps = rewards.u, self.rate
        return -(1 - eps) * F.logsigmoid(u) - eps * F.logsigmoid(-u)


class RDPO(LabelNoiseObjective):
    """Robust DPO: [-(1 - eps) ls(u) + eps ls(-u)] / (1 - 2 eps); eps is ``label_noise`` (arXiv 2403.00409).

    Its mean over labels that are flipped at rate eps is the true label's DPO loss. It has no lower bound.
    """

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        u, eps = rewards.u, self.rate
        return (-(1 - eps) * F.logsigmoid(u) + eps * F.logsigmoid(-u)) / (1 - 2 * eps)


class RPOEM(Objective):
    """RE-PO (EM): -w ls(u) - (1 - w) ls(-u), w = sigmoid(u + logit(1 - eps)) held fixed (arXiv 2509.24159).

    w is the posterior probability that the label is right, eps the flip rate. After each update eps moves to
    the batch's mean of 1 - w: eps <- (1 - momentum) eps + momentum mean(1 - w). The gradient is that of the
    likelihood of labels that are flipped at rate eps, -log[(1 - eps) sigmoid(u) + eps sigmoid(-u)].

    Args:
        beta: see ``Objective``.
        initial_rate: eps before the first update, in (0, 0.5); at 0.5 a fresh policy (u = 0) has no gradient.
            The paper's main experiments are reported to start at 0.1 (a reliability of 0.9).
        momentum: how far eps moves at an update, in (0, 1]; the paper's is reported to be 0.1.

    Raises:
        UserError: an argument is out of its range.
    """

    corrects_labels = True
    holds_factors = True

    def __init__(self, beta: float = 0.1, initial_rate: float = 0.25, momentum: float = 0.1):
        super().__init__(beta)
        if not 0 < initial_rate < 0.5:
            raise UserError(
                f"initial_rate is {initial_rate}, but the flip rate to start from must be between 0 and 0.5."
            )
        if not 0 < momentum <= 1:
            raise UserError(f"momentum is {momentum}, but it must be above 0 and at most 1 (usual: 0.1).")
        self.momentum = momentum
        self.initial_rate = initial_rate
        self.estimated_rate = initial_rate

    def right(self, rewards: Rewards) -> Tensor:
        """(N,) posterior probabilities w that the labels are right, detached."""
        eps = self.estimated_rate
        return torch.sigmoid(rewards.u.detach() + math.log1p(-eps) - math.log(eps))

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        u, w = rewards.u, self.right(rewards)
        return -w * F.logsigmoid(u) - (1 - w) * F.logsigmoid(-u)

    @torch.no_grad()
    def observe(self, rewards: Rewards, ids: list[str]) -> None:
        """Moves eps towards the mean of 1 - w over all ranks. See ``Objective``."""
        wrong = 1 - self.right(rewards)
        sums = torch.stack([wrong.sum(), wrong.new_tensor(len(wrong))])
        sum_over_ranks([sums])
        self.estimated_rate = self.moved(self.estimated_rate, float(sums[0] / sums[1]))

    def moved(self, rate: float, wrong: float) -> float:
        """A rate after an update in which the mean of 1 - w was ``wrong``."""
        found = (1 - self.momentum) * rate + self.momentum * wrong
        # Away from 0 and 1, from which EM never comes back and where the logit is infinite.
        return min(max(found, 1e-6), 1 - 1e-6)

    def state_dict(self) -> dict[str, Any]:
        """The estimated rate."""
        return {"estimated_rate": self.estimated_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        super().load_state_dict(state)
        self.estimated_rate = state["estimated_rate"]
