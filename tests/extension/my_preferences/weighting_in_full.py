"""A weighting that looks at the noise, the pairs and the strategy before training starts."""

from __future__ import annotations

from typing import Any

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.rewards import Rewards

from .weighting import ConsensusWeights


class CautiousConsensus(ConsensusWeights):
    """``ConsensusWeights`` where a consensus can be found."""

    def set_label_noise(self, rate: float, uniform: bool = True) -> None:
        if rate >= 0.5:
            raise UserError(f"A consensus trusts the majority, but {rate:.0%} of the labels are wrong.")

    def check_pairs(self, pairs: Any) -> None:
        if len(pairs) < 2:
            raise UserError(f"A consensus needs 2 training pairs or more, but there is {len(pairs)}.")

    def check_plan(self, updates: int, updates_per_epoch: int) -> None:
        if updates < 2:
            raise UserError(
                f"A consensus is learned and then used, but the run has {updates} update; train on."
            )

    def observe(self, rewards: Rewards, batch: PairBatch) -> None:
        self.slope.data *= 0.999

    def check_sharded(self) -> None:
        raise UserError("CautiousConsensus has not been tried under ZeRO-3; use a lower stage.")
