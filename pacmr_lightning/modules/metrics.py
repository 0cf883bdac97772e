"""Metrics of DPO training and of the weights, and how well weights tell flipped pairs."""

import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ..rewards import Rewards, Weights

REWARDS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "rewards/saturated",
    "logps/chosen",
    "logps/rejected",
)
SATURATED_U = math.log(0.999 / 0.001)
"""u from which sigmoid(u) is above 0.999, and DPO's loss has no gradient to speak of."""
VNET = ("slope", "offset", "restraint")
"""Means over VNet's a and b, or those of a fixed sigmoid weighting."""
GAP = ("weights/unflipped", "weights/flipped", "weights/gap")
"""Statistics of a window in which both kinds of labels are known."""
PAIR_WEIGHTS = "pair_weights"
"""Group of names for weights of the last visits."""
WEIGHT_GAP = ("mean_unflipped", "mean_flipped", "gap", "auroc", "average_precision")


class RunningMeans(nn.Module):
    """Running means by name, over pairs and ranks."""

    def __init__(self, names: tuple[str, ...]):
        super().__init__()
        # Else torchmetrics would wait for the GPU at each update.
        self.means = nn.ModuleDict({name: MeanMetric(nan_strategy="disable") for name in names})
        for metric in self._metrics.values():
            metric.persistent(True)  # so that a window continues after a resume

    @property
    def _metrics(self) -> Mapping[str, MeanMetric]:
        return cast("Mapping[str, MeanMetric]", self.means)

    def update(self, values: dict[str, Tensor]) -> None:
        """Add (N,) values, detached, to each named mean; empty ones add nothing."""
        for name, value in values.items():
            if value.numel():
                self._metrics[name].update(value.detach().float())

    def gathered_state(self) -> dict[str, Tensor]:
        """Return the ``state_dict`` over all ranks, which call this together and keep their own."""
        with ExitStack() as stack:
            for metric in self._metrics.values():
                stack.enter_context(metric.sync_context())
            return {name: value.clone() for name, value in self.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Restore what ``gathered_state`` returned, on the means' device."""
        keys = super().load_state_dict(state, strict, assign)
        # torchmetrics keeps the loaded tensors, which are on the CPU.
        for metric in self._metrics.values():
            metric.to(metric.device)
        return keys

    def compute(self) -> dict[str, Tensor]:
        """Return the 0-dim means over all ranks since the last call, without those that saw no value."""
        means = {}
        for name, metric in self._metrics.items():
            with warnings.catch_warnings():
                # Metrics without values are NaN, but computed: other ranks may have values and wait.
                warnings.filterwarnings("ignore", message=".*before the ``update`` method")
                value = metric.compute()
            if torch.isfinite(value):
                means[name] = value
        self.reset()
        return means

    def reset(self) -> None:
        """Forget all values."""
        for metric in self._metrics.values():
            metric.reset()


def last_update(trainer: Trainer) -> int:
    """Return the step at which Lightning logs the last update's metrics."""
    return max(trainer.global_step - 1, 0)


def name_with_step(trainer: Trainer, name: str) -> str:
    """Return NAME-step-NNNNN, by the updates done, for a file's name."""
    return f"{name}-step-{trainer.global_step:05d}"


def log_numbers(trainer: Trainer, values: Mapping[str, float]) -> None:
    """Log scalars once, with the last update's metrics, and add them to ``trainer.callback_metrics``."""
    # What LightningModule.log gets, Lightning logs again and again until the epoch ends.
    kept = {name: torch.tensor(value, dtype=torch.double) for name, value in values.items()}
    trainer.callback_metrics.update(kept)
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=last_update(trainer))
        logger.save()


def reward_values(rewards: Rewards, losses: Tensor) -> dict[str, Tensor]:
    """Return (N,) values of the ``REWARDS`` metrics; a margin of 0 counts as half right."""
    u = rewards.u
    return {
        "loss": losses,
        "rewards/chosen": rewards.chosen,
        "rewards/rejected": rewards.rejected,
        "rewards/margins": u,
        "rewards/accuracies": _share_above_zero(u),
        "rewards/saturated": u > SATURATED_U,
        "logps/chosen": rewards.policy.chosen,
        "logps/rejected": rewards.policy.rejected,
    }


def gold_accuracy(rewards: Rewards, eta: Tensor) -> Tensor:
    """Return (n,) values for pairs with a known better response: 1 if u prefers it, 1/2 in a tie, else 0.

    Unlike with drawn labels, a perfect policy has 1. At an ``eta`` (N,) of NaN or 0.5 no response is better.
    """
    better = torch.sign(eta - 0.5)
    known = better.abs() == 1  # NaN is not
    return _share_above_zero((rewards.u * better.to(rewards.u))[known])


def _share_above_zero(u: Tensor) -> Tensor:
    return ((u > 0).float() + (u >= 0).float()) / 2


def restraint(a: Tensor, b: Tensor, floor: float) -> Tensor:
    """Return 1 - 2 g'(0) / g(0) of weights g(u) = floor + (1 - floor) sigmoid(a u + b): DPO's 1, or less.

    It is how much of DPO's restoring force is left at u = 0, as a multiple of beta (docs/methods.md).

    >>> restraint(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), floor=0.0)  # 1 - 2 a sigmoid(-b)
    tensor([0.0000, 0.7616])
    """
    g = floor + (1 - floor) * b.sigmoid()
    return 1 - 2 * (1 - floor) * a * b.sigmoid() * (-b).sigmoid() / g


class WeightStatistics(RunningMeans):
    """Mean, spread, effective sample size and gap of weights, as running sums over pairs.

    The gap is that of ``weight_gap``, which waits for the GPU and needs all ranks' pairs in one place.
    """

    def __init__(self) -> None:
        names = ("from_half", "square", "unflipped", "of_unflipped", "flipped", "of_flipped")
        super().__init__((*names, *VNET))

    def add(self, weights: Weights, flipped: Tensor, floor: float | None) -> None:
        """Add N pairs' weights; ``flipped`` (N,) is 1, 0, or -1 where unknown.

        ``floor`` is that of g(u); None where 1 - g weighs the other label, and nothing is restrained.
        """
        g = weights.g
        # Weights begin near 1/2; measured from there, the spread keeps its digits in fp32.
        values = {"from_half": g - 0.5, "square": (g - 0.5) ** 2}
        # Products, because selecting rows waits for the GPU.
        for name, is_it in (("unflipped", flipped == 0), ("flipped", flipped == 1)):
            values |= {name: is_it, f"of_{name}": is_it * g}
        if weights.a is not None and weights.b is not None:
            values |= {"slope": weights.a, "offset": weights.b}
            if floor is not None:
                values["restraint"] = restraint(weights.a, weights.b, floor)
        self.update(values)

    def compute(self) -> dict[str, Tensor]:
        """Return statistics since the last call; the effective sample size is a share, in (0, 1]."""
        means = super().compute()
        from_half, square = means["from_half"], means["square"]
        mean = from_half + 0.5
        statistics = {
            "weights/mean": mean,
            "weights/std": (square - from_half**2).clamp(min=0).sqrt(),
            "weights/effective_sample_size": mean**2 / (square + from_half + 0.25),
        }
        statistics |= {f"weights/{name}": means[name] for name in VNET if name in means}
        if means["unflipped"] > 0 and means["flipped"] > 0:
            unflipped, flipped = (means[f"of_{name}"] / means[name] for name in ("unflipped", "flipped"))
            statistics |= zip(GAP, (unflipped, flipped, unflipped - flipped), strict=True)
        return statistics


def weight_gap(weights: Tensor, flipped: Tensor) -> dict[str, float | None]:
    """Return the mean weights, their gap, and AUROC and average precision of low weights for flips.

    ``weights`` are (N,), or other scores that are low for wrong labels; ``flipped`` (N,) 1 for a wrong label,
    0 for a right one, -1 for unknown, left out. None if undefined: no known flips, only one kind, a NaN
    weight, or for ``auroc`` and ``average_precision`` equal weights.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    known = flipped >= 0
    scores, wrong = weights[known].double(), flipped[known] == 1
    statistics: dict[str, float | None] = dict.fromkeys(WEIGHT_GAP)
    if scores.isnan().any():
        return statistics
    means = [float(part.mean()) if len(part) else None for part in (scores[~wrong], scores[wrong])]
    statistics["mean_unflipped"], statistics["mean_flipped"] = means
    if None not in means:
        statistics["gap"] = float(scores[~wrong].mean() - scores[wrong].mean())
        if scores.min() < scores.max():
            for name, score in (("auroc", roc_auc_score), ("average_precision", average_precision_score)):
                statistics[name] = round(float(score(wrong.cpu(), -scores.cpu())), 6)
    return statistics
