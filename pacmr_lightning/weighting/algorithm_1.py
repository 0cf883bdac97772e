"""Algorithm 1 of Qu et al.: one update of the policy, top to bottom.

omega are the LoRA parameters and Theta those of VNet, V. Of pair i, u_i is the implicit reward margin,
Delta_i the sum of both rewards, l_i(omega) the loss and g_i = V(Delta_i, u_i; Theta) the weight; no gradient
flows through a weight. Line 1 is the loop over updates, and line 6 the datamodule's meta-batch. Plain DPO is
line 12 alone, with weights of 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ..batch import PairBatch
from ..meta_gradient.estimators import MetaGradientEstimator, coefficient_metrics, relative_error
from ..meta_gradient.gradient import Direction, norm, zeros
from ..meta_gradient.outer_objectives import OuterObjective
from ..meta_gradient.step_pairs import StepPairs
from ..policy.lora_layer import UnsupportedLoraError
from ..rewards import Rewards
from ..strategies.ranks import sum_over_ranks
from .base import Weighting, Weights

NORM_FLOOR = 1e-10
"""Below this norm of d_meta the update is skipped."""


@dataclass
class WeightedGradient:
    """Gradient of 1/N sum_i g_i l_i over the global batch, with its weights.

    With soft labels: of 1/N sum_i [g_i l_i + (1 - g_i) l'_i], where l' is the loss under the other label.
    """

    gradient: Direction
    rewards: Rewards
    """Rewards of this rank's pairs, detached."""
    losses: Tensor
    """(n,) l of this rank's pairs under the observed labels, detached."""
    weights: Weights
    """Weights of this rank's pairs."""
    total: Tensor
    """0-dim number of pairs N in the global batch."""


def policy_gradient(
    pairs: StepPairs, weighting: Weighting, meta: PairBatch | None, learning_rate: float, peak: float
) -> tuple[WeightedGradient, dict[str, Tensor]]:
    """Return the gradient of one policy update, and what the weighting's update logs.

    Args:
        pairs: B_t, this rank's training pairs at omega.
        weighting: gives g_i; if there is ``meta``, it learns first.
        meta: this rank's meta-batch, in every K-th update of the policy; else None.
        learning_rate: the policy's current one.
        peak: the largest of its schedule.
    """
    # Lines 3 to 11, of a VNetWeighting by ``update_vnet`` below: Theta.
    metrics = {} if meta is None else weighting.update(pairs, meta, learning_rate, peak)
    # Line 12: the gradient for omega, with weights of the new Theta.
    return weighted_gradient(pairs, weighting), metrics


def weighted_gradient(pairs: StepPairs, weighting: Weighting) -> WeightedGradient:
    """Return the gradient of the weighted training loss: lines 2 to 5, and again line 12.

    With several micro-batches, a grouped objective (Dr.DPO) computes all losses once more, without gradient.
    """
    objective = pairs.objective
    total = torch.tensor(float(len(pairs.batch)), device=pairs.batch.input_ids.device)
    sum_over_ranks([total])  # N
    groups: Sequence[Tensor | None] = [None] * len(pairs.parts)
    if objective.grouped and len(pairs.parts) > 1:
        group = objective.group_weights(pairs.weighted_losses())
        if group is not None:
            groups = group.split([len(part) for part, _ in pairs.parts])

    gradient, rewards, losses, parts = zeros(pairs.policy.adapter()), [], [], []
    for part, group in zip(pairs, groups, strict=True):  # lines 2, 3: u_i, Delta_i, l_i at omega
        rewards.append(part.rewards)
        losses.append(part.losses)
        weights = weighting.weights(part.rewards, part.batch)  # line 4: g_i
        parts.append(weights)
        factors: Tensor | None = weights.g / total
        swapped = (1 - weights.g) / total if weighting.soft_labels else None
        if objective.grouped:  # weighs pairs itself
            factors = objective.group_weights(part.losses) if group is None else group
        assert factors is not None, "a grouped objective has weights"
        part.add_gradient(gradient, factors, swapped)  # line 5: 1/N sum_i g_i grad l_i(omega)
    sum_over_ranks(gradient.values())
    return WeightedGradient(gradient, Rewards.cat(rewards), torch.cat(losses), Weights.cat(parts), total)


def update_vnet(
    pairs: StepPairs,
    weighting: Weighting,
    inputs: Callable[[Rewards, PairBatch], list[Tensor]],
    outer: OuterObjective,
    estimator: MetaGradientEstimator,
    meta: PairBatch,
    alpha: float,
    factor: float,
    compare: bool,
) -> tuple[bool, dict[str, Tensor]]:
    """Update Theta once: lines 3 to 11; omega does not change.

    It is skipped if VNet's gradient is 0, since Adam would move VNet by its momentum alone: no pair of the
    meta-batch passes the threshold, d_meta vanishes, or ``factor`` is 0.

    Args:
        pairs: B_t at omega.
        weighting: has ``vnet`` and its optimizer.
        inputs: of VNet, (N,) each, from the rewards of N pairs.
        outer: the loss of the meta-batch.
        estimator: of the coefficients c_i.
        meta: B_meta, this rank's M pairs.
        alpha: length of the virtual step.
        factor: of VNet's gradient, in place of alpha.
        compare: compare the coefficients with the exact ones.

    Returns:
        Whether VNet was updated, and values to log.
    """
    # Lines 3 to 5: the weighted loss's gradient at omega.
    inner = weighted_gradient(pairs, weighting)
    # Line 5: inside, the policy runs at omega^ = omega - alpha gradient.
    with pairs.policy.shifted(inner.gradient, -alpha):
        # Lines 7 to 9: u of both views, pseudo-labels y_j of the pairs that pass tau, and d_meta, the
        # gradient of their loss at omega^.
        found = outer.gradient(
            pairs.policy, pairs.objective.beta, meta, pairs.micro_batch_size or len(pairs.batch)
        )
    d_norm = norm(found.d_meta)
    metrics = {**found.metrics, "meta/d_norm": d_norm}
    if not (found.retained and float(d_norm) > NORM_FLOOR and factor > 0):
        return False, metrics
    # Line 10: c_i = d_meta . grad l_i(omega), clipped.
    c = estimator.coefficients(pairs, found.d_meta)
    if compare:
        try:
            metrics["meta/estimator_error"] = relative_error(c, pairs.along(found.d_meta))
        except UnsupportedLoraError as error:
            rank_zero_warn(f"meta/estimator_error is not measured: {error}")
    clipped = estimator.clipped(c)
    metrics |= coefficient_metrics(c, clipped, inner.total)
    # Line 11: an Adam step of Theta along -alpha/N sum_i c_i dV_i/dTheta, with alpha in c.
    vnet, optimizer, c = weighting.vnet, weighting.vnet_optimizer, factor * clipped
    assert vnet is not None and optimizer is not None
    optimizer.zero_grad()
    with torch.enable_grad():
        g, _, _ = vnet(*inputs(inner.rewards, pairs.batch))
        (-(c.to(g.dtype) * g).sum() / inner.total.to(g.dtype)).backward()
    sum_over_ranks([p.grad for p in vnet.parameters() if p.grad is not None])
    optimizer.step()
    return True, metrics
