"""The gradient of the weighted training loss, for the virtual and the real step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import TokenBudget
from ..gradient import Direction
from ..meta_gradient.step_pairs import PairLosses, StepPairs
from ..ranks import sum_over_ranks
from .base import Weighting, Weights


@dataclass
class WeightedGradient:
    """Gradient of 1/N sum_i g_i l_i over the global batch, with its weights.

    With soft labels: of 1/N sum_i [g_i l_i + (1 - g_i) l'_i], where l' is the loss under the other label.
    """

    gradient: Direction
    weights: Weights
    """Weights of this rank's pairs, before division by their mean."""
    mean_weight: Tensor
    """0-dim mean of g over the global batch."""
    total: Tensor
    """0-dim number of pairs in the global batch."""


def weighted_gradient(pairs: StepPairs, weighting: Weighting) -> WeightedGradient:
    """Return the step's gradient under the current weights, which are constants in it.

    With several micro-batches, a grouped objective (Dr.DPO) computes all losses once more, without gradient.
    """
    objective = pairs.objective
    total = torch.tensor(float(len(pairs.batch)), device=pairs.batch.input_ids.device)
    sum_over_ranks([total])
    group = None
    if objective.grouped and len(pairs.micro_batches()) > 1:
        assert not isinstance(pairs.micro_batch_size, TokenBudget), "the module refuses it"
        group = objective.group_weights(pairs.losses, pairs.micro_batch_size)

    def factors(seen: PairLosses) -> Tensor:
        if not objective.grouped:
            return weighting.weights(seen.rewards, seen.batch).g / total
        weights = objective.group_weights(seen.losses) if group is None else group[seen.place]
        assert weights is not None, "a grouped objective has weights"
        return weights

    gradient = pairs.weighted(factors, None if pairs.soft is None else total)
    weights = weighting.weights(pairs.rewards, pairs.batch)
    mean = weights.g.sum() / total
    sum_over_ranks([mean])
    if weighting.mean_one:
        torch._foreach_div_(list(gradient.values()), mean)
    return WeightedGradient(gradient, weights, mean, total)
