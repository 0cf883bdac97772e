"""How a policy judges pairs under two wordings of their prompts (paper, appendix on their consistency)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from ..batch import UNKNOWN
from ..errors import UserError

_BY_TAU = ("retained", "known", "right", "same")
"""Sums of ``PromptConsistencyMetrics``, one for each threshold."""


class Judgements(NamedTuple):
    """What u of both views says of N pairs, in float64. u of exactly 0 sides with either response by half."""

    l1: Tensor
    """(N,) l1 distance of the two binary preference distributions, in [0, 2]."""
    right: Tensor
    """(N,) 1 where the original view sides with the truly better response, 0 where not, NaN if unknown."""
    same: Tensor
    """(N,) 1 where both views side with one response, 0 where not."""


def judge(u: Tensor, augmented_u: Tensor, clean: Tensor) -> Judgements:
    """Compares N pairs' two views with each other and with the truth.

    Args:
        u: (N,) implicit reward differences of the original views, first minus second response.
        augmented_u: (N,) those of the same pairs under their reworded prompts.
        clean: (N,) 1 where the first response is the truly better one, 0 where the second is, -1 unknown.

    Raises:
        ValueError: the three differ in shape.
    """
    if not u.shape == augmented_u.shape == clean.shape:
        raise ValueError(f"shapes differ: {u.shape}, {augmented_u.shape}, {clean.shape}")
    u, augmented_u = u.double(), augmented_u.double()
    # As the accuracy in metrics.py: an undecided policy is half right, whichever response comes first.
    right = _first(u, clean == 1)
    same = ((u > 0) == (augmented_u > 0)).double() / 2 + ((u >= 0) == (augmented_u >= 0)).double() / 2
    return Judgements(
        l1=2 * (u.sigmoid() - augmented_u.sigmoid()).abs(),
        right=right.masked_fill(clean == UNKNOWN, math.nan),
        same=same,
    )


def _first(u: Tensor, first_is_better: Tensor) -> Tensor:
    side = ((u > 0).double() + (u >= 0).double()) / 2
    return torch.where(first_is_better, side, 1 - side)


def passes(u: Tensor, taus: Sequence[float]) -> Tensor:
    """(N, T) whether each of N pairs is confident enough at each of T thresholds.

    sigma(u) >= tau or <= 1 - tau, as in ``PromptAugmentationConsistency``; the paper's definition of the
    coverage has > instead, which differs in ties only.
    """
    # logit(tau) against u itself, since sigma(u) rounds to 1 for large u.
    thresholds = [math.log(tau / (1 - tau)) for tau in taus]
    return u.double().abs().unsqueeze(1) >= torch.tensor(thresholds, dtype=torch.float64, device=u.device)


class PromptConsistencyMetrics(Metric):
    """Distance of two views' judgements, and coverage and quality of confident ones, over all ranks.

    Args:
        taus: T confidence thresholds, each at least 0.5 and below 1.

    Raises:
        UserError: there are no thresholds, or one is out of range.
    """

    full_state_update = False
    is_differentiable = False
    pairs: Tensor
    l1: Tensor
    retained: Tensor
    known: Tensor
    right: Tensor
    same: Tensor

    def __init__(self, taus: Sequence[float]):
        super().__init__()
        check_taus(taus)
        self.taus = tuple(taus)
        # Sums of halves and of float64 distances: counts stay exact up to 2^52 pairs.
        for name, shape in (("pairs", ()), ("l1", ()), *((name, (len(taus),)) for name in _BY_TAU)):
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, u: Tensor, augmented_u: Tensor, clean: Tensor) -> None:
        """Adds N pairs; arguments and errors as in ``judge``."""
        found = judge(u, augmented_u, clean)
        kept = passes(u, self.taus).double()
        self.pairs += len(u)
        self.l1 += found.l1.sum()
        self.retained += kept.sum(0)
        self.known += (kept * (clean != UNKNOWN).double().unsqueeze(1)).sum(0)
        self.right += (kept * found.right.nan_to_num(0).unsqueeze(1)).sum(0)
        self.same += (kept * found.same.unsqueeze(1)).sum(0)

    def compute(self) -> dict[str, Tensor]:
        """Over all pairs of all ranks, in float64 (counts in int64).

        ``pairs`` (0-dim) and ``l1`` (0-dim mean), and for each threshold, as (T,) values: ``retained``
        (count), ``known`` (retained pairs whose better response is known), ``coverage``, ``clean_accuracy``
        (of the known ones) and ``direction_agreement``. A mean over no pairs is NaN.
        """
        return {
            "pairs": self.pairs.long(),
            "l1": self.l1 / self.pairs,
            "retained": self.retained.long(),
            "known": self.known.long(),
            "coverage": self.retained / self.pairs,
            "clean_accuracy": self.right / self.known,
            "direction_agreement": self.same / self.retained,
        }


def check_taus(taus: Sequence[float]) -> None:
    """Raises UserError unless there are thresholds, and each is at least 0.5 and below 1."""
    if not taus:
        raise UserError("taus is empty, but at least one confidence threshold is needed, such as 0.6.")
    for tau in taus:
        if not 0.5 <= tau < 1:
            raise UserError(
                f"taus has {tau}, but each must be at least 0.5 and below 1 (the paper uses 0.6)."
            )


def clustered_standard_error(values: np.ndarray, clusters: np.ndarray) -> float:
    """Standard error of a mean of values that may depend on each other within clusters: pairs of a prompt.

    sqrt(G / (G - 1) * sum over clusters of (sum of the cluster's deviations from the mean)^2) / N. Where each
    of N values of 0 or 1 is a cluster, that is the binomial sqrt(p (1 - p) / (N - 1)).

    Args:
        values: (N,) floats.
        clusters: (N,) numbers of the G clusters that they belong to, from 0 on; numbers may be missing.

    Returns:
        NaN for fewer than two clusters.
    """
    sums = np.bincount(clusters, values - values.mean()) if len(values) else np.zeros(0)
    count = len(np.unique(clusters))
    if count < 2:
        return math.nan
    return math.sqrt(count / (count - 1) * np.square(sums).sum()) / len(values)
