"""Outer objectives: losses of the policy after the virtual step."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import UNKNOWN, MicroBatchSize, PairBatch
from ..errors import UserError, check_choice, check_within
from ..policy import Direction, PolicyModel
from ..rewards import Rewards
from ..strategies.ranks import sum_over_ranks

Normalizer = Literal["meta", "retained"]


@dataclass
class OuterGradient:
    """d_meta, the gradient of the outer loss at the policy's current (shifted) parameters."""

    d_meta: Direction
    retained: int
    """Number of pairs in the loss, over all ranks."""
    metrics: dict[str, Tensor]
    """Over all ranks."""


class OuterObjective(ABC):
    """A loss on the meta-batch whose gradient with respect to omega is d_meta.

    ``VNetWeighting`` calls it at each update, on every rank, with the policy at the virtual parameters.
    """

    @abstractmethod
    def gradient(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: MicroBatchSize
    ) -> OuterGradient:
        """Return the loss's gradient, summed over ranks.

        Args:
            policy: gives ``log_probs`` of pairs, with gradient, and ``reference_log_probs``, without.
            beta: the objective's, for ``Rewards``.
            meta: this rank's M pairs. ``meta.augmented`` are the same pairs under augmented prompts; None
                with clean pairs. If some are left out, ranks run different numbers of forward passes,
                which ``policy.in_step`` evens out for ZeRO-3.
            micro_batch_size: pairs of a forward pass with gradient, or a ``TokenBudget``; None for all pairs.

        Raises:
            UserError: the meta-batch is of the wrong kind.
        """


class PromptConsistency(OuterObjective):
    """Base class: a pair's preference should not change with its augmented prompt (section 5.2).

    u of the original views, without gradient, gives pseudo-labels; the loss is the cross-entropy of the
    augmented views of the retained pairs. Observed labels are not used.
    """

    @abstractmethod
    def targets(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (K,) indices of retained pairs and their targets in [0, 1] for (M,) original u."""

    def divisor(self, retained: Tensor, total: Tensor) -> Tensor:
        """Return the divisor of the summed loss, by default M over all ranks."""
        return total

    def gradient(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: MicroBatchSize
    ) -> OuterGradient:
        """See ``OuterObjective``."""
        augmented = meta.augmented
        if augmented is None:
            raise UserError(
                f"{type(self).__name__} compares a pair with itself under an augmented prompt, but the "
                "meta-batch has none; remove clean_meta from the datamodule's options."
            )

        # Line 7: u(z_j) of the original views. Line 8: pseudo-labels, and the pairs that are retained.
        with torch.no_grad():
            u = torch.cat([_u(policy, beta, part) for part in meta.micro_batches(micro_batch_size)])
        retained, targets = self.targets(u)
        sizes = u.new_tensor([len(retained), len(meta)])
        sum_over_ranks([sizes])
        divisor = self.divisor(*sizes).clamp(min=1)

        # Line 9: the meta loss of the augmented views, and d_meta, its gradient at omega^.
        views = augmented[retained], augmented[:1]
        d_meta, view = _gradient(policy, beta, *views, targets, divisor, micro_batch_size)
        kept = u[retained], view, targets, meta.flipped[retained]
        metrics = _consistency_metrics(*kept, sizes[0], sizes[1], divisor)
        return OuterGradient(d_meta, int(sizes[0]), metrics)


def pseudo_label_loss(u: Tensor, targets: Tensor) -> Tensor:
    """Return (K,) cross-entropies of sigma(u), P(first is better), against targets in [0, 1]."""
    return -targets * F.logsigmoid(u) - (1 - targets) * F.logsigmoid(-u)


def _consistency_metrics(
    u: Tensor,
    view: Tensor,
    targets: Tensor,
    flipped: Tensor,
    retained: Tensor,
    total: Tensor,
    divisor: Tensor,
) -> dict[str, Tensor]:
    """Metrics over all ranks; u, view, targets and flipped are (K,), of this rank's retained pairs."""
    as_observed, known = targets >= 0.5, flipped != UNKNOWN
    means = {
        "meta/pseudo_labels_as_observed": as_observed,
        "meta/direction_agreement": (u >= 0) == (view >= 0),
        "meta/l1": 2 * (view.sigmoid() - u.sigmoid()).abs(),
    }
    counts = {"known": known, "clean": known & (as_observed == (flipped == 0))}
    sums = sums_over_ranks(means | counts | {"loss": pseudo_label_loss(view, targets)})
    metrics = {"meta/loss": sums["loss"] / divisor, "meta/coverage": retained / total}
    metrics |= {name: sums[name] / retained for name in means}
    if sums["known"]:
        metrics["meta/clean_accuracy"] = sums["clean"] / sums["known"]
    return metrics


class PromptAugmentationConsistency(PromptConsistency):
    """Consistency with hard pseudo-labels of confident pairs (Qu et al., section 5.3).

    u of the original view gives label 0 (first response better) if sigma(u) >= tau and label 1 if sigma(u) <=
    1 - tau; other pairs are left out. The loss is 1/M sum of -log sigma(u(A(z))) for label 0 and -log
    sigma(-u(A(z))) for label 1.

    Args:
        tau: confidence threshold, 0.5 <= tau < 1; Qu et al. use 0.6.
        normalize: "meta" divides by M, the size of the global meta-batch, with the pairs that were left out
            (Qu et al., section 5.4), "retained" by the number of the others (section 5.3).
    """

    def __init__(self, tau: float = 0.6, normalize: Normalizer = "meta"):
        check_within("[0.5, 1)", " (Qu et al.: 0.6)", tau=tau)
        check_choice(Normalizer, normalize=normalize)
        self.tau = tau
        self.normalize = normalize

    def targets(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return confident pairs and P(first is better), 0 or 1."""
        # Compare u with logit(tau), since sigma(u) rounds to 1 for large u.
        threshold = math.log(self.tau / (1 - self.tau))
        kept = (u.abs() >= threshold).nonzero(as_tuple=True)[0]
        return kept, (u[kept] >= threshold).to(u.dtype)

    def divisor(self, retained: Tensor, total: Tensor) -> Tensor:
        """Return M, or the number of retained pairs."""
        return total if self.normalize == "meta" else retained


class SoftPromptConsistency(PromptConsistency):
    """Consistency with soft pseudo-labels: cross-entropy against the stopped prediction sigma(u(z)).

    There is no threshold. Hard labels reward confidence and can confirm themselves in long runs; these do
    not.
    """

    def targets(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return all pairs and sigma(u)."""
        return torch.arange(len(u), device=u.device), u.sigmoid()


class CleanPreference(OuterObjective):
    """DPO's loss on clean pairs, of which the first response is better: MWN-DPO (appendix G, Algorithm 2)."""

    def gradient(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: MicroBatchSize
    ) -> OuterGradient:
        """See ``OuterObjective``; the meta-batch has clean pairs."""
        if meta.augmented is not None:
            raise UserError(
                "CleanPreference learns from clean pairs, but the meta-batch has noisy training pairs; "
                "give the datamodule a source of clean pairs as clean_meta."
            )
        right = torch.ones(len(meta), device=meta.input_ids.device)
        pairs = right.sum()
        sum_over_ranks([pairs])
        d_meta, u = _gradient(policy, beta, meta, meta[:1], right, pairs, micro_batch_size)
        total = sums_over_ranks({"loss": pseudo_label_loss(u, right), "right": u > 0})
        metrics = {"meta/loss": total["loss"] / pairs, "meta/accuracy": total["right"] / pairs}
        return OuterGradient(d_meta, int(pairs), metrics)


def _gradient(
    policy: PolicyModel,
    beta: float,
    pairs: PairBatch,
    filler: PairBatch,
    targets: Tensor,
    divisor: Tensor,
    micro_batch_size: MicroBatchSize,
) -> tuple[Direction, Tensor]:
    """Return d_meta of K pairs with (K,) targets, and (K,) u; ``filler`` as in ``PolicyModel.in_step``."""
    d_meta, margins = policy.zeros(), targets[:0]
    most = micro_batch_size
    if isinstance(most, int) and len(pairs) > most:  # the fewest micro-batches, about equal for a low peak
        most = math.ceil(len(pairs) / math.ceil(len(pairs) / most))
    for part, counted in policy.in_step(pairs.micro_batches(most), filler):
        u = _u(policy, beta, part)[: len(part) if counted else 0]  # a filler's gradient is 0
        some = targets[len(margins) :][: len(u)]
        policy.add_gradient(d_meta, pseudo_label_loss(u, some).sum() / divisor)
        margins = torch.cat([margins, u.detach()])
    sum_over_ranks(d_meta.values())
    return d_meta, margins


def _u(policy: PolicyModel, beta: float, pairs: PairBatch) -> Tensor:
    return Rewards(policy.log_probs(pairs), policy.reference_log_probs(pairs), beta).u


def sums_over_ranks(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return 0-dim sums of vectors over the pairs of all ranks, in fp32 or better."""
    dtype = next(value.dtype for value in values.values() if value.is_floating_point())
    sums = torch.stack([value.to(dtype).sum() for value in values.values()])
    sum_over_ranks([sums])
    return dict(zip(values, sums, strict=True))
