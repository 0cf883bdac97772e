"""Preference objectives: losses of single pairs. (Those with groups or memory: ``robust_objectives``.)

u is the implicit reward difference beta h, ls is logsigmoid.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..gradient import sum_over_ranks
from ..rewards import Rewards


class Objective(ABC):
    """A preference loss, one value a pair; the weighting multiplies it, the module averages it.

    The other methods have neutral defaults. They are for objectives that weigh the pairs of a batch against
    each other (``grouped``), drop pairs (``pair_weights``) or learn something from every step (``observe``).

    Args:
        beta: DPO temperature, which scales log(pi / pi_ref) to implicit rewards; above 0.

    Raises:
        UserError: beta is not above 0, or infinite.
    """

    grouped: bool = False
    """Whether ``group_weights`` takes the place of the plain mean over pairs."""
    holds_factors: bool = False
    """Whether the loss holds factors fixed that depend on omega, so that differences of its values do not
    estimate its gradient."""
    label_noise: float | Literal["auto"] | None = None
    """The flip rate that the loss is told; "auto" until ``resolve_label_noise``, None where it has none."""

    def __init__(self, beta: float = 0.1):
        if not 0 < beta < math.inf:
            raise UserError(f"beta is {beta}, but it must be above 0 and finite (the paper uses 0.1).")
        self.beta = beta

    @abstractmethod
    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced.

        Raises:
            UserError: ``label_noise`` is "auto" and nobody resolved it.
        """

    def group_weights(self, losses: Tensor, micro_batch_size: int | None = None) -> Tensor | None:
        """Weights whose weighted sum of losses over all ranks has the gradient of the step's loss.

        Every rank must call it, with all of its pairs of the optimizer step at once.

        Args:
            losses: (N,) losses of this rank, detached.
            micro_batch_size: how the module cuts them into micro-batches; None for one.

        Returns:
            (N,) weights that sum to 1 over all ranks; None where the step's loss is the plain mean.
        """
        return None

    def group_value(self, losses: Tensor, micro_batch_size: int | None = None) -> Tensor:
        """0-dim value of the step's loss over all ranks, from the same arguments; here the plain mean."""
        sums = torch.stack([losses.sum(), losses.new_tensor(len(losses))])
        sum_over_ranks([sums])
        return sums[0] / sums[1]

    def pair_weights(self, ids: list[str]) -> Tensor | None:
        """(N,) fp32 factors of these pairs' losses, on the CPU: 0 drops a pair. None: all are 1."""
        return None

    def observe(self, rewards: Rewards, ids: list[str]) -> None:
        """Sees this rank's N pairs of an optimizer step, detached, when all of its losses are computed.

        Every rank calls it once a step; what is learned is the same on all of them.
        """

    def check_plan(self, updates: int, updates_per_epoch: int) -> None:
        """Looks at the length of a run before it starts.

        Raises:
            UserError: an option would do nothing in so short a run.
        """

    def resolve_label_noise(self, rate: float) -> None:
        """Sets a ``label_noise`` that is "auto"; the number that is there may be given again.

        Raises:
            UserError: the objective has no ``label_noise``, has another number, or cannot take this one.
        """
        raise UserError(
            f"{type(self).__name__} has no label_noise to set to {rate}; choose CDPO or RDPO instead."
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep, as plain numbers, lists and dicts. The same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned.

        Raises:
            UserError: it is the state of an objective of another kind.
        """
        if state.keys() != self.state_dict().keys():
            raise UserError(
                f"The checkpoint's objective kept {sorted(state)}, but {type(self).__name__} keeps "
                f"{sorted(self.state_dict())}; resume with the objective that the run had."
            )


class DPO(Objective):
    """Direct preference optimization: -ls(u) (paper, equation 1; arXiv 2305.18290)."""

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        return -F.logsigmoid(rewards.u)


class LabelNoiseObjective(Objective):
    """A loss that is told the rate of flipped labels.

    Args:
        beta: see ``Objective``.
        label_noise: the rate, in [0, 0.5); "auto" leaves it to ``resolve_label_noise``.
    """

    def __init__(self, beta: float = 0.1, label_noise: float | Literal["auto"] = "auto"):
        super().__init__(beta)
        if label_noise != "auto":
            self._check_label_noise(label_noise)
        self.label_noise = label_noise

    def _check_label_noise(self, rate: float) -> None:
        if not 0 <= rate < 0.5:
            raise UserError(
                f"label_noise is {rate}, but {type(self).__name__} needs a rate from 0 to below 0.5; at 0.5 "
                "labels say nothing, above it exchange chosen and rejected."
            )

    def resolve_label_noise(self, rate: float) -> None:
        """See ``Objective``."""
        if self.label_noise not in ("auto", rate):
            raise UserError(
                f"label_noise is {self.label_noise} already and cannot become {rate}; make it auto to take "
                "the data's rate."
            )
        self._check_label_noise(rate)
        self.label_noise = rate

    @property
    def rate(self) -> float:
        """``label_noise`` as a number.

        Raises:
            UserError: it is still "auto".
        """
        if self.label_noise == "auto":
            raise UserError(
                f"{type(self).__name__}'s label_noise is auto, but there is no noise rate to take it from; "
                "give it as a number."
            )
        return self.label_noise

    def state_dict(self) -> dict[str, Any]:
        """The rate, which "auto" may have set."""
        return {"label_noise": self.label_noise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the rate over where it is still "auto" here."""
        super().load_state_dict(state)
        if self.label_noise == "auto" and state["label_noise"] != "auto":
            self.resolve_label_noise(state["label_noise"])


class CDPO(LabelNoiseObjective):
    """Conservative DPO, label smoothing: -(1 - eps) ls(u) - eps ls(-u); eps is ``label_noise``.

    Smallest where sigmoid(u) = 1 - eps. (Mitchell, "A note on DPO with noisy preferences", 2023.)
    """

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        u, eps = rewards.u, self.rate
        return -(1 - eps) * F.logsigmoid(u) - eps * F.logsigmoid(-u)


class RDPO(LabelNoiseObjective):
    """Robust DPO: [-(1 - eps) ls(u) + eps ls(-u)] / (1 - 2 eps); eps is ``label_noise`` (arXiv 2403.00409).

    Its mean over labels that are flipped at rate eps is the true label's DPO loss. It has no lower bound.
    """

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        u, eps = rewards.u, self.rate
        return (-(1 - eps) * F.logsigmoid(u) + eps * F.logsigmoid(-u)) / (1 - 2 * eps)


class IPO(Objective):
    """Identity preference optimization: (h - 1 / (2 beta))^2 (arXiv 2310.12036, equation 17).

    Args:
        beta: the paper's tau.
        length_normalize: False has sums of token log-ratios in h, as the paper writes it; True has each
            response's mean over its tokens, h = r_c / len_c - r_r / len_r, as TRL does. The two want betas
            of different size: a mean is tens of times smaller than a sum.
    """

    def __init__(self, beta: float = 0.1, length_normalize: bool = False):
        super().__init__(beta)
        self.length_normalize = length_normalize

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced.

        Raises:
            ValueError: ``length_normalize`` is on and the rewards bring no token counts.
        """
        h = rewards.h
        if self.length_normalize:
            if rewards.chosen_tokens is None or rewards.rejected_tokens is None:
                raise ValueError("length_normalize needs the numbers of response tokens (see Rewards.of)")
            chosen = (rewards.policy.chosen - rewards.reference.chosen) / rewards.chosen_tokens
            h = chosen - (rewards.policy.rejected - rewards.reference.rejected) / rewards.rejected_tokens
        return (h - 1 / (2 * self.beta)) ** 2


class R3M(Objective):
    """Robust reward modeling for DPO: min over d >= 0 of -ls(u + d) + lam d (arXiv 2406.15568, section 3.4).

    d is what the pair's label is off by, 0 for most pairs (an L1 penalty). With t = logit(1 - lam), the
    minimum is at d = max(0, t - u), the paper's equation 3.4. So the loss is -ls(u) where u >= t and its
    tangent below, -ls(t) + lam (t - u): no pair pulls harder than lam.

    Args:
        beta: see ``Objective``.
        lam: lambda, in (0, 1); near 1 it is DPO. The paper searches {0.65, 0.75, 0.85} on TL;DR and
            {0.75, 0.8, 0.85} on HH; 0.75 is the middle of the one and a member of the other, and calls a pair
            an outlier from u < -1.1 on.
    """

    def __init__(self, beta: float = 0.1, lam: float = 0.75):
        super().__init__(beta)
        if not 0 < lam < 1:
            raise UserError(f"lam is {lam}, but it must be between 0 and 1 (its paper tunes 0.65 to 0.85).")
        self.lam = lam

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        u = rewards.u
        t = math.log1p(-self.lam) - math.log(self.lam)
        # Below t, u + d is t, and -ls(t) is -log(1 - lam). Computing u + d would round t away for large u.
        return torch.where(u < t, self.lam * (t - u) - math.log1p(-self.lam), -F.logsigmoid(u))
