"""Algorithm 1 of Qu et al.: one update of the policy, top to bottom.

omega are the LoRA parameters and Theta those of VNet, V. Of pair i, u_i is the implicit reward margin,
Delta_i the sum of both rewards, l_i(omega) the loss and g_i = V(Delta_i, u_i; Theta) the weight; no gradient
flows through a weight. Line 1 is the loop over updates, line 2 makes the ``StepPairs``, and line 6 is the
datamodule's meta-batch. Plain DPO is line 12 alone, with weights of 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ..batch import PairBatch
from ..errors import UserError, check_choice, check_within
from ..meta_gradient.estimators import GhostDotProduct, MetaGradientEstimator
from ..meta_gradient.outer_objectives import OuterObjective, PromptAugmentationConsistency, sums_over_ranks
from ..meta_gradient.step_pairs import AskedGradients, StepPairs
from ..policy import Direction
from ..policy.lora_layer import UnsupportedLoraError
from ..rewards import Rewards, Weights
from ..strategies.ranks import on_all_ranks, sum_over_ranks
from .base import Weighting
from .sigmoid_prior import auto_offset

NORM_FLOOR = 1e-10
"""Below this norm of d_meta the update is skipped."""
LARGE_ERROR = 0.2
"""Relative error of the estimator above which a run says so, once."""


@dataclass
class WeightedGradient:
    """Gradient of 1/N sum_i g_i l_i over the global batch, and detached values of this rank's n pairs."""

    gradient: Direction
    total: Tensor
    """0-dim number of pairs N in the global batch."""
    rewards: Rewards
    losses: Tensor
    """(n,) l under the observed labels."""
    weights: Weights


def policy_gradient(
    pairs: StepPairs, weighting: Weighting, meta: PairBatch | None, learning_rate: float, peak: float
) -> tuple[WeightedGradient, dict[str, Tensor]]:
    """Return the gradient of one policy update, and what the weighting's update logs.

    Args:
        pairs: the train batch at omega, line 2.
        weighting: gives g_i; if there is ``meta``, it learns first.
        meta: this rank's meta-batch, in every K-th update of the policy; else None.
        learning_rate: the policy's current one.
        peak: the largest of its schedule.
    """
    # Lines 3 to 11, of a ``VNetWeighting``, below: Theta.
    metrics = {} if meta is None else weighting.update(pairs, meta, learning_rate, peak)
    # Line 12: the gradient for omega, with weights of the new Theta.
    return weighted_gradient(pairs, weighting), metrics


def weighted_gradient(pairs: StepPairs, weighting: Weighting) -> WeightedGradient:
    """Return the gradient of the weighted training loss: lines 3 to 5, and again line 12.

    With several micro-batches, a grouped objective (Dr.DPO) computes all losses once more, without gradient.
    """
    objective, gradient = pairs.objective, pairs.policy.zeros()
    total = torch.tensor(float(len(pairs.batch)), device=pairs.batch.input_ids.device)
    sum_over_ranks([total])  # N
    groups = None
    if objective.grouped and len(pairs.parts) > 1:
        sizes = [len(part) for part, _ in pairs.parts]
        groups = iter(objective.group_weights(pairs.current_losses()).split(sizes))

    rewards, losses, weights = [], [], []
    for part in pairs:  # line 3: u_i, Delta_i; l_i at omega
        rewards.append(part.rewards.detach())
        losses.append(part.losses.detach())
        weights.append(weighting.weights(rewards[-1], part.batch))  # line 4: g_i
        g = weights[-1].g
        for of, shape in ((weighting, (*g.shape,)), (objective, (*part.losses.shape,))):
            if shape != (n := len(part.batch),):  # would be broadcast
                raise UserError(f"{type(of).__name__} returns the shape {shape} for {n} pairs, not ({n},).")
        factors = g / total
        if objective.grouped:  # weighs pairs itself
            factors = objective.group_weights(losses[-1]) if groups is None else next(groups)
        if weighting.soft_labels:  # g_i l_i + (1 - g_i) l'_i, where l' is the loss under the other label
            assert not part.each, "a weighting that learns has no soft labels"
            swapped = objective(part.rewards.exchanged())
            part = replace(part, losses=torch.cat([part.losses, swapped]))
            factors = torch.cat([factors, (1 - g) / total])
        pairs.add_gradient(gradient, part, factors)  # line 5: 1/N sum_i g_i grad l_i(omega)
    sum_over_ranks(gradient.values())
    return WeightedGradient(gradient, total, Rewards.cat(rewards), torch.cat(losses), Weights.cat(weights))


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
        max_slope: largest a, above ``start_slope``; at it a pair's slope has no gradient. Qu et al.: None.
        check_every: VNet updates between two comparisons of the estimator with the exact coefficients, logged
            as ``meta/estimator_error`` (one more backward each); None for no comparison, and
            ``GhostDotProduct``, which is exact, has none.
        keep_gradients: in VNet's updates, keep each training pair's gradient, 4 bytes a trained parameter;
            else the pairs run again for the virtual step and for the policy's own. "auto" keeps them where
            memory allows.

    Raises:
        UserError: an argument is out of its range.
    """

    vnet: "VNet"
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
        check_choice(Literal["auto", True, False], keep_gradients=keep_gradients)
        if max_slope is not None and max_slope <= start_slope:
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
        self.start_offset = self._asked = start_offset
        self.floor = floor
        self.max_slope = max_slope
        self.check_every = None if isinstance(self.estimator, GhostDotProduct) else check_every
        self._said_error = False
        self.keep_gradients = keep_gradients
        self.vnet_optimizer = torch.optim.Adam(self.vnet.parameters(), lr=learning_rate)

    def update(
        self, pairs: StepPairs, meta: PairBatch, learning_rate: float, peak: float
    ) -> dict[str, Tensor]:
        """Update Theta once: lines 3 to 11; omega does not change.

        It is skipped, and counted, if VNet's gradient is 0, since Adam would move VNet by its momentum alone:
        no pair of the meta-batch passes the threshold, d_meta vanishes, or its factor is 0.
        """
        alpha = learning_rate if self.virtual_lr is None else self.virtual_lr
        factor = learning_rate / peak if self.alpha_in_gradient and self.virtual_lr is None else 1.0
        if self.updates == self.skipped == 0 and isinstance(self.estimator, GhostDotProduct):
            pairs.along(pairs.policy.zeros())  # raises at once for layers that mix rows
        # Lines 3 to 5: the weighted loss's gradient at omega.
        inner = weighted_gradient(pairs, self)
        # Line 5: inside, the policy runs at omega^ = omega - alpha gradient.
        with pairs.policy.shifted(inner.gradient, -alpha):
            # Lines 7 to 9: u of both views, pseudo-labels y_j of the pairs that pass tau, and d_meta, the
            # gradient of their loss at omega^.
            outer = self.outer.gradient(
                pairs.policy, pairs.objective.beta, meta, pairs.micro_batch_size or len(pairs.batch)
            )
        d_norm = get_total_norm(outer.d_meta.values())
        metrics = {**outer.metrics, "meta/d_norm": d_norm}
        learns = outer.retained > 0 and float(d_norm) > NORM_FLOOR and factor > 0
        if learns:
            # Line 10: c_i = d_meta . grad l_i(omega), clipped.
            c = self.estimator.coefficients(pairs, outer.d_meta)
            if self.check_every is not None and self.updates % self.check_every == 0:
                metrics |= self._estimator_error(c, pairs, outer.d_meta)
            clipped = self.estimator.clipped(c)
            kinds = {"coefficient_mean": clipped, "coefficient_abs_mean": clipped.abs()}
            sums = sums_over_ranks(kinds | {"clipped_share": clipped != c})
            metrics |= {f"meta/{name}": value / inner.total for name, value in sums.items()}
            # Line 11: an Adam step of Theta along -alpha/N sum_i c_i dV_i/dTheta, with alpha in c.
            self.vnet_optimizer.zero_grad()
            with torch.enable_grad():
                g, _, _ = self.vnet(*self.inputs(inner.rewards, pairs.batch))
                (-((factor * clipped).to(g.dtype) * g).sum() / inner.total.to(g.dtype)).backward()
            sum_over_ranks([p.grad for p in self.vnet.parameters() if p.grad is not None])
            self.vnet_optimizer.step()
        self.updates += learns
        self.skipped += not learns
        metrics["meta/skipped_updates"] = torch.tensor(float(self.skipped))
        return {name: value for name, value in metrics.items() if torch.isfinite(value)}

    def set_label_noise(self, rate: float, uniform: bool = True) -> None:
        """Set the start offset if "auto" was given and VNet has not learned yet."""
        if self._asked == "auto" and not self.vnet_optimizer.state:
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

    def _estimator_error(self, c: Tensor, pairs: StepPairs, d_meta: Direction) -> dict[str, Tensor]:
        """Compare (N,) unclipped coefficients with the exact ones; say once if the error is large."""
        try:
            exact = pairs.along(d_meta)
        except UnsupportedLoraError as failure:
            rank_zero_warn(f"meta/estimator_error is not measured: {failure}")
            return {}
        squares = sums_over_ranks({"off": (c - exact).square(), "exact": exact.square()})
        error = (squares["off"] / squares["exact"]).sqrt()
        if error > LARGE_ERROR and not self._said_error:
            self._said_error = True
            rank_zero_warn(
                f"{type(self.estimator).__name__} is {float(error):.0%} off the exact coefficients, at "
                f"norm(d_meta) {float(get_total_norm(d_meta.values())):.2g}: its step is lost in rounding or "
                "too long. Use GhostDotProduct, or a relative step of 0.03 to 0.1; meta/estimator_error has "
                "later errors."
            )
        return {"meta/estimator_error": error}

    def to(self, device: torch.device) -> None:
        """Move VNet to a device, before its optimizer has any state; all ranks take the first one's."""
        self.vnet.load_state_dict(on_all_ranks([self.vnet.state_dict()])[0])
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


class VNet(nn.Module):
    """V, a network from a pair's implicit rewards to its weight (Qu et al., section 5.1).

    [Delta, u] -> [a, b], g = c + (1 - c) sigmoid(a u + b); Delta and u are unscaled, in nats times beta.
    The last layer starts with weight 0 and the start values as bias, so all pairs have the same a and b at
    first:

    >>> delta, u = torch.tensor([0.5, 0.1]), torch.tensor([2.0, -1.0])
    >>> g, a, b = VNet()(delta, u)
    >>> g.detach()  # sigmoid(u)
    tensor([0.8808, 0.2689])
    >>> VNet(floor=0.3)(delta, u)[0].detach()  # 0.3 + 0.7 sigmoid(u)
    tensor([0.9166, 0.4883])

    Computes in its own precision under autocast.

    Args:
        hidden: widths of the hidden layers (ReLU between them); Qu et al.: 64 and 16.
        slope: a at the start.
        offset: b at the start.
        floor: c, the smallest weight; Qu et al.: 0.
        max_slope: largest a; at it a pair's slope has no gradient. Qu et al.: None.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (64, 16),
        slope: float = 1.0,
        offset: float = 0.0,
        floor: float = 0.0,
        max_slope: float | None = None,
    ):
        super().__init__()
        self.floor, self.max_slope = floor, max_slope
        widths = [2, *hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        last = nn.Linear(widths[-1], 2)
        nn.init.zeros_(last.weight)
        self.layers = nn.Sequential(*layers, last)
        self.start(slope, offset)

    @property
    def _last(self) -> nn.Linear:
        return cast("nn.Linear", self.layers[-1])

    @torch.no_grad()
    def start(self, slope: float, offset: float) -> None:
        """Set the last layer's bias, a and b of every pair while its weight is 0."""
        self._last.bias.copy_(torch.tensor([slope, offset]))

    def forward(self, delta: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (N,) weights g, slopes a and offsets b of (N,) Delta and u.

        No gradient flows into the rewards (appendix A).
        """
        with torch.autocast(u.device.type, enabled=False):
            inputs = torch.stack([delta, u], dim=1).detach().to(self._last.weight.dtype)
            a, b = self.layers(inputs).unbind(1)
            if self.max_slope is not None:
                a = a.clamp(max=self.max_slope)
            g = torch.sigmoid(a * inputs[:, 1] + b)
            return self.floor + (1 - self.floor) * g, a, b
