"""VNetWeighting: owns VNet and its optimizer, and does one VNet update (paper, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch import PairBatch
from ..errors import UserError
from ..gradient import accumulated_gradient, norm, sum_over_ranks
from ..objectives import Objective
from ..policy import PolicyModel
from ..rewards import Rewards
from .base import Weighting, Weights
from .hypergradient import Estimator, GhostDotProduct
from .outer import OuterObjective, PromptAugmentationConsistency
from .shift import shifted
from .vnet import VNet

NORM_FLOOR = 1e-10
"""Below this norm of d_meta there is nothing to learn from, and relative steps would be huge."""


class VNetWeighting(Weighting):
    """Weights from VNet, which is learned through one virtual policy update.

    The virtual step's alpha is a constant factor of VNet's gradient, -(alpha/N) sum_i c_i dV_i/dTheta. It is
    left out of that gradient: Adam does not see constant factors, and one as small as a policy's learning
    rate would push the gradient towards Adam's epsilon.

    Args:
        outer: what the virtual policy should be good at.
        estimator: of the coefficients c_i; ``GhostDotProduct`` is exact, ``CentralDifference`` the paper's.
        hidden: widths of VNet's hidden layers.
        learning_rate: of VNet's Adam; the paper has 1e-3 on TL;DR and 5e-4 on HH.
        every: VNet learns at policy updates 0, every, 2 every, ...; the paper has 10.
        virtual_lr: alpha, the length of the virtual step; None means the policy's current learning rate.

    Raises:
        UserError: an argument is out of its range.
    """

    def __init__(
        self,
        outer: OuterObjective | None = None,
        estimator: Estimator | None = None,
        hidden: Sequence[int] = (64, 16),
        learning_rate: float = 1e-3,
        every: int = 10,
        virtual_lr: float | None = None,
    ):
        if every < 1:
            raise UserError(f"every is {every}, but VNet learns every 1, 2, ... policy updates (paper: 10).")
        if not learning_rate > 0:
            raise UserError(f"VNet's learning_rate is {learning_rate}, but must be above 0 (paper: 0.001).")
        if virtual_lr is not None and not virtual_lr >= 0:
            raise UserError(f"virtual_lr is {virtual_lr}, but it must not be negative.")
        if not hidden or min(hidden) < 1:
            raise UserError(f"hidden is {list(hidden)}, but VNet needs widths of at least 1 (paper: 64, 16).")
        self.outer = outer or PromptAugmentationConsistency()
        self.estimator = estimator or GhostDotProduct()
        self.every = every
        self.virtual_lr = virtual_lr
        # Its own random stream, so that runs with and without VNet start from the same adapter.
        with torch.random.fork_rng():
            self.vnet = VNet(hidden)
        self.vnet_optimizer = torch.optim.Adam(self.vnet.parameters(), lr=learning_rate)
        self.updates = 0
        self.skipped = 0

    @torch.no_grad()
    def weights(self, rewards: Rewards) -> Weights:
        """Weights of N pairs under the current Theta."""
        return Weights(*self.vnet(rewards.delta, rewards.u))

    def update(
        self,
        policy: PolicyModel,
        objective: Objective,
        train: PairBatch,
        meta: PairBatch,
        *,
        learning_rate: float,
        micro_batch_size: int | None,
    ) -> dict[str, Tensor]:
        """One VNet update; omega stays as it is. See ``Weighting.update``.

        Where no meta pair passes the threshold, or d_meta vanishes, VNet stays and the skip is counted.
        """
        total = torch.tensor(float(len(train)), device=train.input_ids.device)
        sum_over_ranks([total])
        rewards: list[Rewards] = []

        def weighted_losses():
            for part in train.micro_batches(micro_batch_size):
                found = Rewards(policy.log_probs(part), part.reference, objective.beta)
                rewards.append(Rewards(found.policy.detach(), found.reference, objective.beta))
                yield (self.weights(rewards[-1]).g * objective(found)).sum() / total

        step = learning_rate if self.virtual_lr is None else self.virtual_lr
        virtual = accumulated_gradient(policy.adapter(), weighted_losses())
        with shifted(policy, virtual, -step):
            outer = self.outer.gradient(policy, objective.beta, meta, micro_batch_size)
        del virtual

        length = norm(outer.direction)
        metrics = {**outer.metrics, "meta/d_norm": length}
        if outer.retained and float(length) > NORM_FLOOR:
            c = self.estimator.coefficients(policy, objective, train, outer.direction, micro_batch_size)
            metrics |= self._step(rewards, c, total)
            self.updates += 1
        else:
            self.skipped += 1
        metrics["meta/skipped_updates"] = torch.tensor(float(self.skipped))
        return {name: value for name, value in metrics.items() if torch.isfinite(value)}

    def _step(self, rewards: list[Rewards], coefficients: Tensor, total: Tensor) -> dict[str, Tensor]:
        """Adam step along -1/N sum_i c_i dV_i/dTheta; returns statistics of c over all ranks."""
        c = self.estimator.clipped(coefficients)
        delta = torch.cat([r.delta for r in rewards])
        u = torch.cat([r.u for r in rewards])
        self.vnet_optimizer.zero_grad()
        with torch.enable_grad():
            g, _, _ = self.vnet(delta, u)
            (-(c.to(g.dtype) * g).sum() / total.to(g.dtype)).backward()
        sum_over_ranks([p.grad for p in self.vnet.parameters()])
        self.vnet_optimizer.step()
        sums = torch.stack([c.sum(), c.abs().sum(), (c != coefficients).sum().to(c.dtype)])
        sum_over_ranks([sums])
        mean, magnitude, clipped = sums / total
        return {
            "meta/coefficient_mean": mean,
            "meta/coefficient_abs_mean": magnitude,
            "meta/clipped_share": clipped,
        }

    def to(self, device: torch.device) -> None:
        """Moves VNet to a device; call it before its optimizer has any state."""
        self.vnet.to(device)

    def state_dict(self) -> dict[str, Any]:
        """VNet, its optimizer, and how many updates were done and skipped."""
        return {
            "vnet": self.vnet.state_dict(),
            "optimizer": self.vnet_optimizer.state_dict(),
            "updates": self.updates,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.vnet.load_state_dict(state["vnet"])
        self.vnet_optimizer.load_state_dict(state["optimizer"])
        self.updates, self.skipped = state["updates"], state["skipped"]
