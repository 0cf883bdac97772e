"""VNet: the network that weighs a pair by its implicit rewards (paper, section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn


class VNet(nn.Module):
    """[Delta, u] -> [a, b], g = sigmoid(a u + b).

    The last layer starts with weight 0 and the start values as bias, so at first a and b are the same for
    every pair; the paper starts at a = 1, b = 0.
    Computes in its own precision, whatever autocast is in force around it.

    Args:
        hidden: widths of the hidden layers (ReLU between them); the paper has 64 and 16.
        slope: a at the start.
        offset: b at the start.
    """

    def __init__(self, hidden: Sequence[int] = (64, 16), slope: float = 1.0, offset: float = 0.0):
        super().__init__()
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
        """Sets the last layer's bias, which is a and b of every pair as long as its weight is 0."""
        self._last.bias.copy_(torch.tensor([slope, offset]))

    def forward(self, delta: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps (N,) reward sums and differences to (N,) weights g, slopes a and offsets b.

        The inputs are frozen: no gradient flows into the rewards (paper, appendix A).
        """
        dtype = self._last.weight.dtype
        with torch.autocast(u.device.type, enabled=False):
            inputs = torch.stack([delta, u], dim=1).detach().to(dtype)
            a, b = self.layers(inputs).unbind(1)
            return torch.sigmoid(a * inputs[:, 1] + b), a, b
