"""The scalars that people know from DPO training, and what the weights add to them (torchmetrics)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from .rewards import Rewards
from .weighting import Weights

REWARDS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


class Means(nn.Module):
    """Named running means over pairs, over all ranks; ``compute`` returns those that saw a value and resets.

    Args:
        names: which means there are.
        checked: NaN raises RuntimeError, for which ``update`` waits for a GPU. Leave it out where somebody
            has looked at the values.
    """

    def __init__(self, names: tuple[str, ...], checked: bool = True):
        super().__init__()
        strategy: Literal["error", "disable"] = "error" if checked else "disable"
        self.means = nn.ModuleDict({name: MeanMetric(nan_strategy=strategy) for name in names})
        for metric in self._metrics.values():
            metric.persistent(True)  # so that a window that a checkpoint interrupts goes on

    @property
    def _metrics(self) -> Mapping[str, MeanMetric]:
        return cast("Mapping[str, MeanMetric]", self.means)

    def update(self, values: dict[str, Tensor]) -> None:
        """Adds (N,) values, detached, to each named mean; empty ones add nothing."""
        for name, value in values.items():
            if value.numel():
                self._metrics[name].update(value.detach().float())

    def gathered_state(self) -> dict[str, Tensor]:
        """``state_dict`` of what all ranks saw; they call it together, and go on with their own."""
        with ExitStack() as stack:
            for metric in self._metrics.values():
                stack.enter_context(metric.sync_context())
            return {name: value.clone() for name, value in self.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Goes on from what ``gathered_state`` returned, on the device that the means are on."""
        found = super().load_state_dict(state, strict, assign)
        # torchmetrics takes the loaded tensors themselves, which come from the CPU.
        for metric in self._metrics.values():
            metric.to(metric.device)
        return found

    def compute(self) -> dict[str, Tensor]:
        """0-dim means over what all ranks saw since the last call."""
        found = {}
        for name, metric in self._metrics.items():
            with warnings.catch_warnings():
                # Of metrics that saw nothing, as all have right after a resume. Their mean is NaN; they are
                # computed all the same, since other ranks may have seen something and wait.
                warnings.filterwarnings("ignore", message=".*before the ``update`` method")
                value = metric.compute()
            if torch.isfinite(value):
                found[name] = value
            metric.reset()
        return found


def reward_values(rewards: Rewards, losses: Tensor) -> dict[str, Tensor]:
    """(N,) values of the ``REWARDS`` metrics; a margin of 0 counts as half right."""
    u = rewards.u
    return {
        "loss": losses,
        "rewards/chosen": rewards.chosen,
        "rewards/rejected": rewards.rejected,
        "rewards/margins": u,
        "rewards/accuracies": _share_above_zero(u),
        "logps/chosen": rewards.policy.chosen,
        "logps/rejected": rewards.policy.rejected,
    }


def gold_accuracy(rewards: Rewards, eta: Tensor) -> Tensor:
    """Of the n <= N pairs whose better response is known: 1 where u prefers it, 0 where not, (n,) values.

    Labels that are drawn go the unlikely way at times, so even a perfect policy disagrees with some of them;
    with the gold sign it does not. A tie in eta has no better response, one in u counts as half right.

    Args:
        rewards: of N pairs.
        eta: (N,) probability that the chosen response is better, NaN where unknown.
    """
    better = torch.sign(eta - 0.5)
    known = better.abs() == 1  # NaN is not
    return _share_above_zero((rewards.u * better.to(rewards.u))[known])


def _share_above_zero(u: Tensor) -> Tensor:
    return ((u > 0).float() + (u >= 0).float()) / 2


class WeightStatistics(Means):
    """Mean, spread, effective sample size and flipped-unflipped gap of weights, none of which is NaN.

    Its gap is the ``gap`` of ``weight_gap``, over the pairs since the last call. But ``weight_gap`` chooses
    rows by what is known of them, for which a GPU has to be waited for, and needs the pairs of all ranks in
    one place; these are running sums for the curves of every step's pairs. The callbacks ``RunSummary`` and
    ``WeightGap`` ask ``weight_gap`` itself.
    """

    def __init__(self) -> None:
        names = ("from_half", "square", "unflipped", "of_unflipped", "flipped", "of_flipped")
        super().__init__((*names, "slope", "offset"), checked=False)

    def add(self, weights: Weights, flipped: Tensor) -> None:
        """Adds N pairs' weights; ``flipped`` (N,) is 1, 0, or -1 where unknown."""
        g = weights.g
        # Weights are near 1/2 at first. Measured from there, their spread keeps its digits in fp32.
        values = {"from_half": g - 0.5, "square": (g - 0.5) ** 2}
        # Shares and products instead of a choice of rows, for which a GPU would have to be waited for.
        for name, is_it in (("unflipped", flipped == 0), ("flipped", flipped == 1)):
            values |= {name: is_it, f"of_{name}": is_it * g}
        if weights.a is not None and weights.b is not None:
            values |= {"slope": weights.a, "offset": weights.b}
        self.update(values)

    def compute(self) -> dict[str, Tensor]:
        """Statistics since the last call; the effective sample size is a share of the pairs, in (0, 1]."""
        means = super().compute()
        from_half, square = means["from_half"], means["square"]
        mean = from_half + 0.5
        found = {
            "weights/mean": mean,
            "weights/std": (square - from_half**2).clamp(min=0).sqrt(),
            "weights/effective_sample_size": mean**2 / (square + from_half + 0.25),
        }
        found |= {f"weights/{name}": means[name] for name in ("slope", "offset") if name in means}
        if means["unflipped"] > 0 and means["flipped"] > 0:
            unflipped, flipped = (means[f"of_{name}"] / means[name] for name in ("unflipped", "flipped"))
            found |= {
                "weights/unflipped": unflipped,
                "weights/flipped": flipped,
                "weights/gap": unflipped - flipped,
            }
        return found
