"""Signs that VNet and policy confirm each other's mistakes, seen without clean labels."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

LEAST = 10
"""VNet updates that a running median or a windowed share must look back on."""


@dataclass
class Thresholds:
    """Where a sign becomes an alarm; None switches it off.

    Args:
        slope: mean slope a of VNet's weights over the one that the run started with.
        norm: norm of d_meta a retained meta pair over its running median.
        share: standard errors by which the share of pseudo-labels that agree with the observed labels has
            fallen from its peak.
    """

    slope: float | None = 1.25
    norm: float | None = None
    share: float | None = 4.0


class SelfConfirmation:
    """Follows the signs of a run, one VNet update after the other.

    - **slope.** With g = sigmoid(a u + b), log g+/g- grows by a for each unit of u. Where it grows faster
      than the log-odds that the label is right, confident mistakes get more weight than they deserve, which
      makes them more confident. (Theorem 1's optimum under symmetric flips has a = 1 where u is those
      log-odds.) A slope that rises through training is this feedback at work.
    - **norm.** d_meta divided by the share of meta pairs that were retained, against the running median of
      earlier updates: in a collapse reworded prompts change the verdict of pairs that the policy is sure of.
    - **share.** Pseudo-labels that agree with the observed labels, over the window. With flip rate eps it
      is 1/2 + (1 - 2 eps)(accuracy - 1/2), so it falls with the accuracy, but at 40% noise by a fifth of it.

    Args:
        window: VNet updates that medians and shares look back on.
        thresholds: where a sign becomes an alarm.
    """

    def __init__(self, window: int, thresholds: Thresholds):
        self.window = window
        self.thresholds = thresholds
        self.norms: deque[float] = deque(maxlen=window)
        self.agreeing: deque[tuple[float, float]] = deque(maxlen=window)
        """Pseudo-labels that agree with the observed ones, and all of them, by VNet update."""
        self.peak: tuple[float, float] | None = None
        """Largest windowed share, and its squared standard error."""

    def update(self, norm: float | None, agreeing: float, retained: float) -> dict[str, float]:
        """Takes one VNet update.

        Args:
            norm: of d_meta a retained meta pair; None where VNet skipped the update.
            agreeing: pseudo-labels that agree with the observed labels.
            retained: pseudo-labels, over all ranks; 0 where there are none.

        Returns:
            Those of ``norm_ratio``, ``pseudo_label_agreement`` and ``pseudo_label_drop`` (in standard errors)
            that are known yet.
        """
        found = {}
        if norm is not None:
            if len(self.norms) >= LEAST:
                found["norm_ratio"] = norm / median(self.norms)
            self.norms.append(norm)
        if retained:
            self.agreeing.append((agreeing, retained))
        if len(self.agreeing) >= LEAST:
            right, count = (sum(column) for column in zip(*self.agreeing, strict=True))
            share = right / count
            # Laplace's rule, so that a share of 1 has an error too.
            smooth = (right + 1) / (count + 2)
            error = smooth * (1 - smooth) / count
            if self.peak is None or share > self.peak[0]:
                self.peak = share, error
            found["pseudo_label_agreement"] = share
            found["pseudo_label_drop"] = (self.peak[0] - share) / (error + self.peak[1]) ** 0.5
        return found

    def causes(self, found: dict[str, float]) -> dict[str, str]:
        """By sign, what is wrong in words, for those that are over their thresholds."""
        limits = self.thresholds
        said = {
            "slope_ratio": (limits.slope, "VNet's slope a has grown to {:.2f} times that of its start"),
            "norm_ratio": (limits.norm, "the norm of d_meta a retained pair is {:.1f} times its median"),
            "pseudo_label_drop": (
                limits.share,
                "the share of pseudo-labels that agree with the labels is {:.1f} standard errors under its "
                "peak",
            ),
        }
        return {
            name: text.format(found[name])
            for name, (limit, text) in said.items()
            if limit is not None and found.get(name, limit) > limit
        }

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain numbers."""
        return {
            "norms": list(self.norms),
            "agreeing": list(self.agreeing),
            "peak": self.peak,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.peak = state["peak"]
        self.norms = deque(state["norms"], maxlen=self.window)
        self.agreeing = deque(state["agreeing"], maxlen=self.window)
