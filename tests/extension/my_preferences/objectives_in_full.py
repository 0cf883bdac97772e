"""Objectives that use what else ``Objective`` offers: state, the noise rate, groups."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from pacmr_lightning.errors import UserError
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.strategies.ranks import on_all_ranks, sum_over_ranks

from .objective import SLiC


class SmallLoss(SLiC):
    """The hinge loss; after ``warm_up`` updates without the share ``label_noise`` of the largest losses."""

    warm_up = 2

    def __init__(self, beta: float = 0.1, label_noise: float | Literal["auto"] = "auto"):
        super().__init__(beta)
        self.label_noise = label_noise
        self.updates = 0
        self.last_loss: dict[str, float] = {}

    def resolve_label_noise(self, rate: float) -> None:
        if self.label_noise not in ("auto", rate):
            raise UserError(f"label_noise is {self.label_noise} already and cannot become {rate}.")
        self.label_noise = rate

    def check_pairs(self, pairs: Any) -> None:
        if len(pairs) < 16:
            raise UserError(f"SmallLoss compares the losses of pairs, but there are {len(pairs)}; give more.")

    def __call__(self, rewards: Rewards) -> Tensor:
        losses = super().__call__(rewards)
        return losses * (losses.detach() <= self.limit())

    def limit(self) -> float:
        """Return the largest loss that counts."""
        if self.updates < self.warm_up:
            return math.inf
        rising = sorted(self.last_loss.values())
        return rising[round((1 - self.label_noise) * (len(rising) - 1))]

    def observe(self, rewards: Rewards, ids: list[str]) -> None:
        losses = super().__call__(rewards).tolist()
        self.last_loss.update(on_all_ranks(list(zip(ids, losses, strict=True))))
        self.updates += 1

    def learned(self) -> dict[str, float]:
        return {"largest_loss": max(self.last_loss.values())}

    def state_dict(self) -> dict[str, Any]:
        return {"label_noise": self.label_noise, "updates": self.updates, "last_loss": dict(self.last_loss)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.label_noise = state["label_noise"]
        self.updates = state["updates"]
        self.last_loss = dict(state["last_loss"])


class HardPairs(SLiC):
    """The hinge loss, in which a pair of the batch counts in proportion to its loss."""

    grouped = True

    def group_weights(self, losses: Tensor, micro_batch_size: int | None = None) -> Tensor:
        shares = losses + 1e-6  # where no pair pulls, all count alike
        total = shares.sum()
        sum_over_ranks([total])
        return shares / total

    def group_value(self, losses: Tensor, micro_batch_size: int | None = None) -> Tensor:
        value = (self.group_weights(losses) * losses).sum()
        sum_over_ranks([value])
        return value
