"""VNet: the network that weighs a pair by its implicit rewards (paper, section 5.1), or by other features."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from .features import PAPER, Feature, ordered
from .running_scale import RunningScale


class VNet(nn.Module):
    """[Delta, u] -> [a, b], g = sigmoid(a u + b); of features without u it is b alone, g = sigmoid(b).

    The last layer starts with weight 0 and the start values as bias, so at first a and b are the same for
    every pair; the paper starts at a = 1, b = 0.
    Computes in its own precision, whatever autocast is in force around it.

    Args:
        hidden: widths of the hidden layers (ReLU between them); the paper has 64 and 16.
        slope: a at the start.
        offset: b at the start.
        features: what it gets of a pair. Delta and u come as they are, others are standardised by ``scale``.

    Raises:
        UserError: ``features`` is empty, names one twice or an unknown one.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (64, 16),
        slope: float = 1.0,
        offset: float = 0.0,
        features: Sequence[Feature] = PAPER,
    ):
        super().__init__()
        self.features = ordered(features)
        widths = [len(self.features), *hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        last = nn.Linear(widths[-1], 2 if self.has_slope else 1)
        nn.init.zeros_(last.weight)
        self.layers = nn.Sequential(*layers, last)
        # Those of the paper come first.
        self._plain = sum(name in PAPER for name in self.features)
        scaled = len(self.features) - self._plain
        self.scale = RunningScale(scaled) if scaled else None
        self.start(slope, offset)

    @property
    def has_slope(self) -> bool:
        """Whether u is among the features, so that there is an a to multiply it with."""
        return "u" in self.features

    @property
    def _last(self) -> nn.Linear:
        return cast("nn.Linear", self.layers[-1])

    @torch.no_grad()
    def start(self, slope: float, offset: float) -> None:
        """Sets the last layer's bias, which is a and b of every pair as long as its weight is 0."""
        self._last.bias.copy_(torch.tensor([slope, offset] if self.has_slope else [offset]))

    def forward(self, *values: Tensor, **named: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps (N,) values of each feature, in order or by name, to (N,) weights g, slopes a and offsets b.

        The inputs are frozen: no gradient flows into the rewards (paper, appendix A). Without u, a is 0.
        """
        values = (*values, *(named.pop(name) for name in self.features[len(values) :]))
        if named:
            raise TypeError(f"VNet of {', '.join(self.features)} got {', '.join(named)} besides.")
        dtype = self._last.weight.dtype
        with torch.autocast(values[0].device.type, enabled=False):
            inputs = torch.stack(values, dim=1).detach().to(dtype)
            if self.scale is not None:
                inputs = torch.cat([inputs[:, : self._plain], self.scale(inputs[:, self._plain :])], dim=1)
            if not self.has_slope:
                b = self.layers(inputs).squeeze(1)
                return torch.sigmoid(b), torch.zeros_like(b), b
            a, b = self.layers(inputs).unbind(1)
            return torch.sigmoid(a * inputs[:, self.features.index("u")] + b), a, b

    def observe(self, values: Tensor) -> None:
        """Standardises later inputs by this step's (N, F) values too; all ranks call it together."""
        if self.scale is not None:
            self.scale.observe(values[:, self._plain :])
