"""ROPO: a noise-tolerant loss with filtering."""

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ..errors import UserError, check_within
from ..ranks import on_all_ranks
from ..rewards import Rewards
from .base import Objective


class ROPO(Objective):
    """ROPO: 4a / (1 + a)^2 [-ls(u) + a sigmoid(-u)], a is ``alpha``; and filtering (arXiv 2404.04102).

    The factor makes the steepest slope 1 (for a >= 1, at sigmoid(u) = (a - 1) / 2a); far below 0 the slope
    tends to 4a / (1 + a)^2.

    arXiv 2404.04102 alternates training and filtering: it minimizes sum_i w_i l_i over the policy, then over
    binary w with a fixed number of ones. Here, every ``filter_every`` updates the ``filter_share`` of all
    pairs seen with the largest last-seen loss gets weight 0 until the next filtering; dropped pairs are
    still observed. A run needs more than one epoch for this to matter; best filter once an epoch. The step's
    loss stays divided by all of its pairs. Rejection sampling of new responses is not included.

    Args:
        beta: see ``Objective``.
        alpha: a, above 0; larger trusts less. Other implementations give 14 as its default and 6, 14
            and 30 as its ablation.
        filter_share: share of the pairs to drop, in (0, 1); None for no filtering.
        filter_every: policy updates between filterings; None without ``filter_share``.
    """

    def __init__(
        self,
        beta: float = 0.1,
        alpha: float = 14.0,
        filter_share: float | None = None,
        filter_every: int | None = None,
    ):
        super().__init__(beta)
        check_within("(0, inf)", " and finite (ROPO's default is 14)", alpha=alpha)
        check_within("(0, 1)", ", or null", filter_share=filter_share)
        if filter_share is None and filter_every is not None:
            raise UserError(f"filter_every is {filter_every}, but nothing is filtered; set filter_share too.")
        if filter_share is not None and (filter_every is None or filter_every < 1):
            raise UserError(
                f"filter_share is {filter_share} and filter_every {filter_every}, but both are needed; "
                "set filter_every to the updates of an epoch."
            )
        self.alpha = alpha
        self.filter_share = filter_share
        self.filter_every = filter_every
        self.kept = () if filter_share is None else ("updates", "last_loss", "dropped")
        self.updates = 0
        self.last_loss: dict[str, float] = {}
        """Loss of each pair at its last visit."""
        self.dropped: list[str] = []
        """Pairs dropped by the last filtering, sorted."""

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses."""
        u, a = rewards.u, self.alpha
        return 4 * a / (1 + a) ** 2 * (a * torch.sigmoid(-u) - F.logsigmoid(u))

    def pair_weights(self, ids: list[str]) -> Tensor | None:
        """(N,) 0 for dropped pairs, 1 for others."""
        if not self.dropped:
            return None
        dropped = set(self.dropped)
        return torch.tensor([0.0 if name in dropped else 1.0 for name in ids])

    @torch.no_grad()
    def observe(self, rewards: Rewards, ids: list[str]) -> None:
        """Store each pair's loss, and filter when due."""
        if self.filter_share is None or self.filter_every is None:
            return
        # On all ranks: a checkpoint is written by one, and all must drop the same pairs.
        self.last_loss.update(on_all_ranks(list(zip(ids, self(rewards).tolist(), strict=True))))
        self.updates += 1
        if self.updates % self.filter_every == 0:
            # Ties are broken by id, the same on all ranks and when resumed.
            worst_first = sorted(self.last_loss, key=lambda name: (-self.last_loss[name], name))
            self.dropped = sorted(worst_first[: round(self.filter_share * len(worst_first))])
            rank_zero_info(
                f"ROPO at update {self.updates}: dropped {len(self.dropped)} of the {len(worst_first)} pairs "
                f"seen so far ({self.filter_share:.1%}), those with the largest losses."
            )

    def check_plan(self, updates: int, updates_per_epoch: int) -> None:
        """Refuse filtering after which no pair is visited."""
        if self.filter_share is None or self.filter_every is None:
            return
        if updates <= max(updates_per_epoch, self.filter_every):
            raise UserError(
                f"filter_share is {self.filter_share}, but in a run of {updates} updates "
                f"({updates_per_epoch} an epoch) with filter_every {self.filter_every} no pair is "
                "visited again after filtering; train for more epochs, or leave filter_share out."
            )
