"""VNet: the network that weighs a pair by its implicit rewards (paper, section 5.1), or by other features.

It is written and read as two files that need no run: weights as safetensors, and what it is as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import UserError
from ..ranks import sum_over_ranks
from .features import PAPER, Feature, ordered

WEIGHTS = "vnet.safetensors"
CONFIG = "vnet_config.json"

DECAY = 0.95
"""Share that mean and variance keep at a step: they look back on about 20."""
LARGEST = 5.0
"""Standard deviations at which a value is cut."""
CONSTANT = 1e-6
"""Standard deviation under which a column is taken for constant: what is left of it is rounding."""


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


class RunningScale(nn.Module):
    """(x - mean) / standard deviation, cut at 5 and -5; both are exponential over the steps before.

    A step uses what the steps before it have found, so a pair's value depends neither on the other pairs of
    its batch nor on how that is cut into micro-batches and ranks. Before the first step is over, and as long
    as a column is constant, its value is 0: that of a mean pair.

    Args:
        columns: F of them.
    """

    weight: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, columns: int):
        super().__init__()
        self.register_buffer("weight", torch.zeros(()))
        """Of all steps so far, 1 - DECAY^t: what divides out that the exponential sums start at 0."""
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("variance", torch.zeros(columns))

    def forward(self, x: Tensor) -> Tensor:
        """(N, F) values of (N, F)."""
        deviation = self.variance.sqrt()
        known = deviation > CONSTANT
        scaled = (x - self.mean) / torch.where(known, deviation, 1)
        return torch.where(known, scaled, 0).clamp(-LARGEST, LARGEST)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Takes this rank's (N, F) values of a step; all ranks call it together, once."""
        x = x.to(self.mean.dtype)
        sums = torch.cat([x.new_tensor([len(x)]), x.sum(0)])
        sum_over_ranks([sums])
        mean = sums[1:] / sums[0]
        # Around the step's own mean, so that a small spread beside a large mean keeps its digits.
        squares = (x - mean).square().sum(0)
        sum_over_ranks([squares])
        weight = DECAY * self.weight + (1 - DECAY)
        share = (1 - DECAY) / weight
        away = mean - self.mean
        self.variance.mul_(1 - share).add_(share * (squares / sums[0] + (1 - share) * away.square()))
        self.mean.add_(share * away)
        self.weight.copy_(weight)


def save_vnet(folder: str | Path, vnet: VNet, settings: dict[str, Any]) -> None:
    """Writes ``vnet.safetensors`` and ``vnet_config.json`` into a folder that exists.

    Args:
        folder: where to write.
        vnet: what to write.
        settings: JSON values on the run that it is from, kept in the second file beside ``hidden``.
    """
    hidden = [layer.out_features for layer in vnet.layers if isinstance(layer, nn.Linear)][:-1]
    outputs, weight = (["a", "b"], "sigmoid(a u + b)") if vnet.has_slope else (["b"], "sigmoid(b)")
    shape = {"hidden": hidden, "inputs": list(vnet.features), "outputs": outputs, "weight": weight}
    text = json.dumps(shape | settings, indent=2, ensure_ascii=False)
    (Path(folder) / CONFIG).write_text(text + "\n", encoding="utf-8")
    save_file({name: value.cpu() for name, value in vnet.state_dict().items()}, Path(folder) / WEIGHTS)


def load_vnet(folder: str | Path) -> VNet:
    """The VNet that ``pacmr export`` wrote; call it with (N,) Delta and (N,) u in nats for (g, a, b).

    Delta and u are the sum and the difference of a pair's implicit rewards (paper, section 5.1), so they have
    the run's beta in them, which ``vnet_config.json`` names. A VNet of other features, which stand there as
    ``inputs``, takes those, unscaled.

    Raises:
        UserError: the folder holds no VNet, or its files are broken or do not fit each other.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        vnet = VNet(config["hidden"], features=config["inputs"])
        vnet.load_state_dict(load_file(folder / WEIGHTS))
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no VNet ({CONFIG}, {WEIGHTS}); name a folder that pacmr export made of a run "
            "whose weighting learns."
        ) from None
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".:")
        raise UserError(f"The VNet in {folder} cannot be loaded ({reason}); export it again.") from None
    return vnet
