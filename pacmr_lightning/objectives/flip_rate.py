"""Objectives with a noise rate: given (cDPO, rDPO) or estimated by EM (RE-PO).

u is the implicit reward margin beta h, ls is logsigmoid.
"""

import math
from collections import defaultdict
from itertools import chain
from statistics import fmean
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError, check_within
from ..rewards import Rewards
from ..strategies.ranks import on_all_ranks
from .base import Objective


class LabelNoiseObjective(Objective):
    """A loss that takes the noise rate.

    Args:
        beta: see ``Objective``.
        label_noise: the rate, in [0, 0.5); "auto" leaves it to ``resolve_label_noise``.
    """

    corrects_labels = True
    kept = ("label_noise",)
    label_noise: float | Literal["auto"]

    def __init__(self, beta: float = 0.1, label_noise: float | Literal["auto"] = "auto"):
        super().__init__(beta)
        if label_noise != "auto":
            self._check_label_noise(label_noise)
        self.label_noise = self.asked_label_noise = label_noise

    def _check_label_noise(self, rate: float) -> None:
        if not 0 <= rate < 0.5:
            raise UserError(
                f"label_noise is {rate}, but {type(self).__name__} needs a rate from 0 to below 0.5; at 0.5 "
                "labels carry no information, above it swap chosen and rejected."
            )

    def resolve_label_noise(self, rate: float) -> None:
        """See ``Objective``."""
        self._check_label_noise(rate)
        self.label_noise = rate

    @property
    def rate(self) -> float:
        """``label_noise`` as a number; raises UserError if it is still "auto"."""
        if self.label_noise == "auto":
            raise UserError(
                f"{type(self).__name__}'s label_noise is auto, but there is no noise rate to take it from; "
                "give it as a number."
            )
        return self.label_noise

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the saved rate if "auto" was given here."""
        if self.asked_label_noise == "auto":
            super().load_state_dict(state)


class CDPO(LabelNoiseObjective):
    """Conservative DPO, label smoothing: -(1 - eps) ls(u) - eps ls(-u); eps is ``label_noise``.

    Minimal where sigmoid(u) = 1 - eps. (Mitchell, "A note on DPO with noisy preferences", 2023.)
    """

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses."""
        u, eps = rewards.u, self.rate
        return -(1 - eps) * F.logsigmoid(u) - eps * F.logsigmoid(-u)


class RDPO(LabelNoiseObjective):
    """Robust DPO: [-(1 - eps) ls(u) + eps ls(-u)] / (1 - 2 eps); eps is ``label_noise`` (arXiv 2403.00409).

    At noise rate eps its mean is the true labels' DPO loss. It has no lower bound.
    """

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses."""
        u, eps = rewards.u, self.rate
        return (-(1 - eps) * F.logsigmoid(u) + eps * F.logsigmoid(-u)) / (1 - 2 * eps)


class RPOEM(Objective):
    """RE-PO (EM): -w ls(u) - (1 - w) ls(-u), w = sigmoid(u + logit(1 - eps)) held fixed (arXiv 2509.24159).

    w is the posterior probability that the label is right, eps the noise rate. After each update
    eps <- (1 - momentum) eps + momentum mean(1 - w). The gradient is that of
    -log[(1 - eps) sigmoid(u) + eps sigmoid(-u)].

    Args:
        beta: see ``Objective``.
        initial_rate: eps before the first update, in (0, 0.5); at 0.5 a fresh policy (u = 0) has no gradient.
            Reported of arXiv 2509.24159's main experiments: 0.1 (a reliability of 0.9).
        momentum: how far eps moves at an update, in (0, 1]; reported of arXiv 2509.24159: 0.1.
    """

    corrects_labels = True
    holds_factors = True
    kept: tuple[str, ...] = ("estimated_rate",)

    def __init__(self, beta: float = 0.1, initial_rate: float = 0.25, momentum: float = 0.1):
        super().__init__(beta)
        check_within("(0, 0.5)", initial_rate=initial_rate)
        check_within("(0, 1]", " (usual: 0.1)", momentum=momentum)
        self.momentum = momentum
        self.initial_rate = initial_rate
        self.estimated_rate = initial_rate

    def right(self, rewards: Rewards) -> Tensor:
        """(N,) detached posterior probabilities w that the labels are right."""
        eps = self.estimated_rate
        return torch.sigmoid(rewards.u.detach() + math.log1p(-eps) - math.log(eps))

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses."""
        u, w = rewards.u, self.right(rewards)
        return -w * F.logsigmoid(u) - (1 - w) * F.logsigmoid(-u)

    @torch.no_grad()
    def observe(self, rewards: Rewards, ids: list[str]) -> None:
        """Move eps towards the mean of 1 - w over all ranks."""
        wrong = 1 - self.right(rewards)
        self.estimated_rate = self._moved(self.estimated_rate, float(self.group_value(wrong)))

    def _moved(self, rate: float, wrong: float) -> float:
        new_rate = (1 - self.momentum) * rate + self.momentum * wrong
        # EM never leaves 0 or 1, where the logit is infinite.
        return min(max(new_rate, 1e-6), 1 - 1e-6)


class AnnotatorRPOEM(RPOEM):
    """``RPOEM`` with a noise rate eps_k for every annotator k (arXiv 2509.24159).

    With the reliability eta_k = 1 - eps_k, w = eta_k sigmoid(u) / [eta_k sigmoid(u) + (1 - eta_k)
    sigmoid(-u)]. After each update eps_k moves to the mean of 1 - w over the annotator's pairs, and the
    common rate to that over all. Unknown annotators have the common rate, and new ones start from it (in
    arXiv 2509.24159, from one value).

    Args:
        beta: see ``Objective``.
        initial_rate: the common rate before the first update, in (0, 0.5); 0.1 is a reliability of 0.9.
        momentum: see ``RPOEM``; an annotator's rate moves only in updates with pairs of theirs.
    """

    kept = ("estimated_rate", "annotator_rates")

    def __init__(self, beta: float = 0.1, initial_rate: float = 0.1, momentum: float = 0.1):
        super().__init__(beta, initial_rate, momentum)
        self.annotator_rates: dict[str, float] = {}
        """eps_k of the annotators so far."""

    def rate_of(self, annotator: str | None) -> float:
        """Return an annotator's eps; the common rate for new or unknown ones."""
        common = self.estimated_rate
        return common if annotator is None else self.annotator_rates.get(annotator, common)

    def check_pairs(self, pairs: Any) -> None:
        """See ``Objective``."""
        if getattr(pairs, "annotators", None) is None:
            raise UserError(
                "AnnotatorRPOEM learns a rate for each annotator, but no training pair names one; give the "
                "rows a column annotator (who gave the label), or choose RPOEM, which has one rate for all."
            )

    def right(self, rewards: Rewards) -> Tensor:
        """(N,) detached posterior probabilities w that the labels are right."""
        u = rewards.u.detach()
        rates = [self.rate_of(name) for name in _annotators(rewards)]
        return torch.sigmoid(u + u.new_tensor([math.log1p(-eps) - math.log(eps) for eps in rates]))

    @torch.no_grad()
    def observe(self, rewards: Rewards, ids: list[str]) -> None:
        """Move each eps_k and the common rate towards the mean of 1 - w."""
        mine = list(zip(_annotators(rewards), (1 - self.right(rewards)).tolist(), strict=True))
        wrong = defaultdict(list)
        for name, value in on_all_ranks(mine):
            wrong[name].append(value)
        # fmean rounds once, so order and ranks change nothing.
        for name, values in wrong.items():
            if name is not None:
                self.annotator_rates[name] = self._moved(self.rate_of(name), fmean(values))
        self.estimated_rate = self._moved(self.estimated_rate, fmean(chain(*wrong.values())))

    def learned(self) -> dict[str, float]:
        """Return the reliability 1 - eps_k of each annotator."""
        return {f"reliability/{name}": 1 - rate for name, rate in sorted(self.annotator_rates.items())}


def _annotators(rewards: Rewards) -> list[str | None]:
    return rewards.annotators or [None] * len(rewards.u)
