"""VNet: a network from a pair's implicit rewards or other features to its weight (Qu et al., section 5.1)."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import UserError, first_line
from ..files import local_path
from ..ranks import sum_over_ranks
from .features import PAPER, Feature, ordered

WEIGHTS = "vnet.safetensors"
CONFIG = "vnet_config.json"

DECAY = 0.95
"""Share that mean and variance keep at a step."""
LARGEST = 5.0
"""Standard deviations that values are clipped to."""
CONSTANT = 1e-6
"""Standard deviation below which a column is constant up to rounding."""


class VNet(nn.Module):
    """[Delta, u] -> [a, b], g = sigmoid(a u + b); of features without u it is b alone, g = sigmoid(b).

    The last layer starts with weight 0 and the start values as bias, so all pairs have the same a and b at
    first. Computes in its own precision under autocast.

    Args:
        hidden: widths of the hidden layers (ReLU between them); Qu et al.: 64 and 16.
        slope: a at the start.
        offset: b at the start.
        features: inputs. Delta and u are unscaled, others are standardised by ``scale``.

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
        self._plain = sum(name in PAPER for name in self.features)
        scaled = len(self.features) - self._plain
        self.scale = RunningScale(scaled) if scaled else None
        self.start(slope, offset)

    @property
    def has_slope(self) -> bool:
        """True if u is among the features."""
        return "u" in self.features

    @property
    def _last(self) -> nn.Linear:
        return cast("nn.Linear", self.layers[-1])

    @torch.no_grad()
    def start(self, slope: float, offset: float) -> None:
        """Set the last layer's bias, a and b of every pair while its weight is 0."""
        self._last.bias.copy_(torch.tensor([slope, offset] if self.has_slope else [offset]))

    def forward(self, *values: Tensor, **named: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (N,) weights g, slopes a and offsets b of (N,) values of each feature, in order or by name.

        No gradient flows into the rewards (appendix A). Without u, a is 0.
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
        """Update the running scale by this step's (N, F) values; all ranks call it."""
        if self.scale is not None:
            self.scale.observe(values[:, self._plain :])


class RunningScale(nn.Module):
    """(x - mean) / standard deviation of F columns, clipped; both are exponential over earlier steps.

    So a value does not depend on micro-batches or ranks. It is 0 before the first step and for constant
    columns.
    """

    weight: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, columns: int):
        super().__init__()
        self.register_buffer("weight", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("variance", torch.zeros(columns))

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, F) scaled values."""
        deviation = self.variance.sqrt()
        known = deviation > CONSTANT
        scaled = (x - self.mean) / torch.where(known, deviation, 1)
        return torch.where(known, scaled, 0).clamp(-LARGEST, LARGEST)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Update by this rank's (N, F) values of a step; all ranks call it, once."""
        x = x.to(self.mean.dtype)
        sums = torch.cat([x.new_tensor([len(x)]), x.sum(0)])
        sum_over_ranks([sums])
        mean = sums[1:] / sums[0]
        # Around the step's own mean, for precision if the spread is small.
        squares = (x - mean).square().sum(0)
        sum_over_ranks([squares])
        weight = DECAY * self.weight + (1 - DECAY)
        share = (1 - DECAY) / weight
        away = mean - self.mean
        self.variance.mul_(1 - share).add_(share * (squares / sums[0] + (1 - share) * away.square()))
        self.mean.add_(share * away)
        self.weight.copy_(weight)


def save_vnet(folder: str | Path, vnet: VNet, settings: dict[str, Any]) -> None:
    """Write VNet and the run's JSON ``settings`` into an existing folder."""
    hidden = [layer.out_features for layer in vnet.layers if isinstance(layer, nn.Linear)][:-1]
    outputs, weight = (["a", "b"], "sigmoid(a u + b)") if vnet.has_slope else (["b"], "sigmoid(b)")
    shape = {"hidden": hidden, "inputs": list(vnet.features), "outputs": outputs, "weight": weight}
    text = json.dumps(shape | settings, indent=2, ensure_ascii=False)
    (Path(folder) / CONFIG).write_text(text + "\n", encoding="utf-8")
    save_file({name: value.cpu() for name, value in vnet.state_dict().items()}, Path(folder) / WEIGHTS)


def load_vnet(folder: str | Path) -> VNet:
    """Return the VNet that ``pacmr export`` wrote; call it with (N,) Delta and (N,) u in nats for (g, a, b).

    Implicit rewards need the run's beta, and other features have the names ``inputs``: see
    ``vnet_config.json``.

    Raises:
        UserError: the folder holds no VNet, or its files are broken or do not fit each other.
    """
    folder = local_path(folder)
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
        reason = first_line(error).rstrip(".:")
        raise UserError(f"The VNet in {folder} cannot be loaded ({reason}); export it again.") from None
    return vnet
