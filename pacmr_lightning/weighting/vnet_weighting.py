"""VNetWeighting: weights from VNet, and its update (Algorithm 1)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ..batch import PairBatch
from ..errors import UserError, check_within
from ..meta_gradient.estimators import GhostDotProduct, MetaGradientEstimator
from ..meta_gradient.outer_objectives import OuterObjective, PromptAugmentationConsistency
from ..meta_gradient.step_pairs import AskedGradients, StepPairs
from ..rewards import Rewards
from .algorithm_1 import update_vnet
from .base import Weighting, Weights
from .sigmoid_prior import auto_offset
from .vnet import VNet

LARGE_ERROR = 0.2
"""Relative error of the estimator above which a run says so, once."""


class VNetWeighting(Weighting):
    """Weights from VNet, which learns through one virtual policy update.

    VNet's gradient is -(alpha/N) sum_i c_i dV_i/dTheta (Qu et al., section 5.4). Adam is invariant to a
    constant factor, but by default alpha is the scheduled learning rate. So the gradient carries alpha
    relative to its peak: VNet's updates shrink as the policy's do, and Adam stays far from its epsilon.

    Args:
        outer: loss of the virtual policy.
        estimator: of the coefficients c_i; ``GhostDotProduct`` (exact), ``CentralDifference`` (Qu et al.).
        hidden: widths of VNet's hidden layers.
        learning_rate: of VNet's Adam; Qu et al.: 1e-3 on TL;DR and 5e-4 on HH.
        every: VNet learns at policy updates 0, every, 2 every, ...; Qu et al.: 10.
        virtual_lr: alpha, the length of the virtual step; None means the policy's current learning rate.
        alpha_in_gradient: multiply VNet's gradient by alpha relative to its peak; with a fixed ``virtual_lr``
            the factor is 1. False leaves alpha out: VNet's updates do not shrink with the policy's, and VNet
            also learns at alpha 0, the first update of a warm-up.
        start_slope: a of every pair before VNet learns; Qu et al.: 1.
        start_offset: b of every pair before VNet learns; Qu et al.: 0; "auto" is logit(1 - rate) of the
            datamodule's noise rate: with slope 1 that is Theorem 1's optimum under symmetric flips.
        floor: c, the smallest weight: g = c + (1 - c) sigmoid(a u + b); docs/methods.md has what it does.
            Qu et al.: 0.
        max_slope: largest a; None (Qu et al.) for no bound.
        check_every: VNet updates between two comparisons of the estimator with the exact coefficients, logged
            as ``meta/estimator_error`` (one more backward each); None for no comparison, and
            ``GhostDotProduct``, which is exact, has none.
        keep_gradients: in VNet's updates, keep each training pair's gradient, 4 bytes a trained parameter;
            else the pairs run again for the virtual step and for the policy's own. "auto" keeps them where
            memory allows.

    Raises:
        UserError: an argument is out of its range.
    """

    vnet: VNet
    vnet_optimizer: torch.optim.Optimizer

    def __init__(
        self,
        outer: OuterObjective | None = None,
        estimator: MetaGradientEstimator | None = None,
        hidden: Sequence[int] = (64, 16),
        learning_rate: float = 1e-3,
        every: int = 10,
        virtual_lr: float | None = None,
        alpha_in_gradient: bool = True,
        start_slope: float = 1.0,
        start_offset: float | Literal["auto"] = 0.0,
        floor: float = 0.0,
        max_slope: float | None = None,
        check_every: int | None = None,
        keep_gradients: AskedGradients = "auto",
    ):
        check_within("[1, inf)", " policy update (Qu et al.: 10)", every=every)
        check_within("[1, inf)", " VNet update, or null for no comparison", check_every=check_every)
        check_within("(0, 1e30]", " (Qu et al.: 0.001)", **{"VNet's learning_rate": learning_rate})
        check_within("[0, 1e30]", virtual_lr=virtual_lr)
        check_within("[0, 1)", floor=floor)
        if max_slope is not None and max_slope < start_slope:
            raise UserError(
                f"max_slope is {max_slope:g}, but start_slope is {start_slope:g}; give a larger max_slope or "
                "a smaller start_slope."
            )
        if not hidden or min(hidden) < 1:
            raise UserError(
                f"hidden is {list(hidden)}, but VNet needs widths of at least 1 (Qu et al.: 64, 16)."
            )
        self.outer = outer or PromptAugmentationConsistency()
        self.estimator = estimator or GhostDotProduct()
        self.every = every
        self.learning_rate = learning_rate
        self.hidden = list(hidden)
        self.virtual_lr = virtual_lr
        self.alpha_in_gradient = alpha_in_gradient
        # A separate random stream, so that runs with and without VNet start from the same adapter.
        with torch.random.fork_rng(devices=[]):
            start = 0.0 if start_offset == "auto" else start_offset
            self.vnet = VNet(hidden, start_slope, start, floor, max_slope)
        self.start_slope = start_slope
        self.start_offset = start_offset
        self.floor = floor
        self.max_slope = max_slope
        self.check_every = None if isinstance(self.estimator, GhostDotProduct) else check_every
        self._said_error = False
        self.keep_gradients = keep_gradients
        self.vnet_optimizer = torch.optim.Adam(self.vnet.parameters(), lr=learning_rate)
        self.updates = 0
        self.skipped = 0

    def set_label_noise(self, rate: float, uniform: bool = True) -> None:
        """Set the start offset if it is "auto"."""
        if self.start_offset == "auto":
            self.start_offset = auto_offset(rate)
            self.vnet.start(self.start_slope, self.start_offset)

    def check_sharded(self) -> None:
        """Refuse kept gradients."""
        if self.keep_gradients is True:
            raise UserError(
                "keep_gradients is true, but ZeRO-3 keeps no pair's gradient; set it to auto or false, or "
                "use a lower stage."
            )

    def inputs(self, rewards: Rewards, batch: PairBatch) -> list[Tensor]:
        """Return VNet's inputs, (N,) each; a subclass with a network of its own may return others."""
        return [rewards.delta, rewards.u]

    @torch.no_grad()
    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Return weights of N pairs under the current Theta."""
        return Weights(*self.vnet(*self.inputs(rewards, batch)))

    def update(
        self, pairs: StepPairs, meta: PairBatch, learning_rate: float, peak: float
    ) -> dict[str, Tensor]:
        """Update VNet once, or count that the update was skipped: Algorithm 1, lines 3 to 11."""
        factor = learning_rate / peak if self.alpha_in_gradient and self.virtual_lr is None else 1.0
        updated, metrics = update_vnet(
            pairs,
            self,
            self.inputs,
            self.outer,
            self.estimator,
            meta,
            alpha=learning_rate if self.virtual_lr is None else self.virtual_lr,
            factor=factor,
            compare=self.check_every is not None and self.updates % self.check_every == 0,
        )
        error = float(metrics.get("meta/estimator_error", 0))
        if error > LARGE_ERROR and not self._said_error:
            self._said_error = True
            rank_zero_warn(
                f"{type(self.estimator).__name__} is {error:.0%} off the exact coefficients, at norm(d_meta) "
                f"{float(metrics['meta/d_norm']):.2g}: its step is lost in rounding or too long. Use "
                "GhostDotProduct, or a relative step of 0.03 to 0.1; meta/estimator_error has later errors."
            )
        self.updates += updated
        self.skipped += not updated
        metrics["meta/skipped_updates"] = torch.tensor(float(self.skipped))
        return {name: value for name, value in metrics.items() if torch.isfinite(value)}

    def to(self, device: torch.device) -> None:
        """Move VNet to a device, before its optimizer has any state."""
        self.vnet.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return VNet, its optimizer, and the numbers of updates and skips."""
        return {
            "vnet": self.vnet.state_dict(),
            "optimizer": self.vnet_optimizer.state_dict(),
            "updates": self.updates,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of ``state_dict``."""
        try:
            self.vnet.load_state_dict(state["vnet"])
        except RuntimeError:
            raise UserError(
                "The checkpoint's VNet has other layers than this one; use the hidden that it was made with."
            ) from None
        self.vnet_optimizer.load_state_dict(state["optimizer"])
        self.updates, self.skipped = state["updates"], state["skipped"]
