"""RE-PO (EM) with a flip rate for each annotator."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..ranks import on_all_ranks
from ..rewards import Rewards
from .flip_rate import RPOEM


class AnnotatorRPOEM(RPOEM):
    """``RPOEM`` in which every annotator k has a flip rate eps_k of their own (arXiv 2509.24159).

    The paper writes the reliability eta_k = 1 - eps_k: w = eta_k sigmoid(u) / [eta_k sigmoid(u) + (1 - eta_k)
    sigmoid(-u)]. After each update eps_k of the batch's annotators moves to the mean of 1 - w over their own
    pairs, and the common rate to that over all pairs. The common rate is that of pairs whose annotator is
    unknown, held-out pairs among them, and what an annotator starts from when first met. (In the paper all
    start from one value; that differs for those who come late.)

    Args:
        beta: see ``Objective``.
        initial_rate: the common rate before the first update, in (0, 0.5); the paper's reliability of 0.9.
        momentum: see ``RPOEM``; an annotator's rate moves only in updates with pairs of theirs.

    Raises:
        UserError: an argument is out of its range.
    """

    def __init__(self, beta: float = 0.1, initial_rate: float = 0.1, momentum: float = 0.1):
        super().__init__(beta, initial_rate, momentum)
        self.rates: dict[str, float] = {}
        """eps_k of the annotators met so far."""

    def rate_of(self, annotator: str | None) -> float:
        """eps of an annotator's labels; the common rate where they were not met yet, or are unknown."""
        return self.estimated_rate if annotator is None else self.rates.get(annotator, self.estimated_rate)

    def check_pairs(self, pairs: Any) -> None:
        """See ``Objective``."""
        if getattr(pairs, "annotators", None) is None:
            raise UserError(
                "AnnotatorRPOEM learns a rate for each annotator, but no training pair names one; give the "
                "rows a column annotator (who gave the label), or choose RPOEM, which has one rate for all."
            )

    def right(self, rewards: Rewards) -> Tensor:
        """(N,) posterior probabilities w that the labels are right, detached."""
        u = rewards.u.detach()
        rates = [self.rate_of(name) for name in _annotators(rewards)]
        return torch.sigmoid(u + u.new_tensor([math.log1p(-eps) - math.log(eps) for eps in rates]))

    @torch.no_grad()
    def observe(self, rewards: Rewards, ids: list[str]) -> None:
        """Moves each eps_k, and the common rate, towards the mean of 1 - w. See ``Objective``."""
        mine = list(zip(_annotators(rewards), (1 - self.right(rewards)).tolist(), strict=True))
        wrong = defaultdict(list)
        for name, value in on_all_ranks(mine):
            wrong[name].append(value)
        everyone = list(chain.from_iterable(wrong.values()))
        # fmean rounds once, so that the order of the pairs and their places on ranks change nothing.
        for name, values in wrong.items():
            if name is not None:
                self.rates[name] = self.moved(self.rate_of(name), fmean(values))
        self.estimated_rate = self.moved(self.estimated_rate, fmean(everyone))

    def learned(self) -> dict[str, float]:
        """The reliability 1 - eps_k of each annotator."""
        return {f"reliability/{name}": 1 - rate for name, rate in sorted(self.rates.items())}

    def state_dict(self) -> dict[str, Any]:
        """The common rate, and those of the annotators."""
        return super().state_dict() | {"annotator_rates": dict(self.rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        super().load_state_dict(state)
        self.rates = dict(state["annotator_rates"])


def _annotators(rewards: Rewards) -> list[str | None]:
    return rewards.annotators or [None] * len(rewards.u)
