"""VNet: the network that weighs a pair by its implicit rewards (paper, section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class VNet(nn.Module):
    """[Delta, u] -> [a, b], g = sigmoid(a u + b).

    The last layer starts with weight 0 and bias (1, 0), so at first a = 1 and b = 0 for every pair.
    Computes in its own precision, whatever autocast is in force around it.

    Args:
        hidden: widths of the hidden layers (ReLU between them); the paper has 64 and 16.
    """

    def __init__(self, hidden: Sequence[int] = (64, 16)):
        super().__init__()
        widths = [2, *hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        last = nn.Linear(widths[-1], 2)
        nn.init.zeros_(last.weight)
        with torch.no_grad():
            last.bias.copy_(torch.tensor([1.0, 0.0]))
        self.layers = nn.Sequential(*layers, last)

    def forward(self, delta: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps (N,) reward sums and differences to (N,) weights g, slopes a and offsets b.

        The inputs are frozen: no gradient flows into the rewards (paper, appendix A).
        """
        dtype = self.layers[-1].weight.dtype
        with torch.autocast(u.device.type, enabled=False):
            inputs = torch.stack([delta, u], dim=1).detach().to(dtype)
            a, b = self.layers(inputs).unbind(1)
            return torch.sigmoid(a * inputs[:, 1] + b), a, b
