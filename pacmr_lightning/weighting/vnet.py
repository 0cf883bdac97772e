"""VNet: a network from a pair's implicit rewards to its weight (Qu et al., section 5.1)."""

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

WEIGHTS = "vnet.safetensors"
CONFIG = "vnet_config.json"


class VNet(nn.Module):
    """[Delta, u] -> [a, b], g = c + (1 - c) sigmoid(a u + b); Delta and u are unscaled, in nats times beta.

    The last layer starts with weight 0 and the start values as bias, so all pairs have the same a and b at
    first:

    >>> delta, u = torch.tensor([0.5, 0.1]), torch.tensor([2.0, -1.0])
    >>> g, a, b = VNet()(delta, u)
    >>> g.detach()  # sigmoid(u)
    tensor([0.8808, 0.2689])
    >>> VNet(floor=0.3)(delta, u)[0].detach()  # 0.3 + 0.7 sigmoid(u)
    tensor([0.9166, 0.4883])

    Computes in its own precision under autocast.

    Args:
        hidden: widths of the hidden layers (ReLU between them); Qu et al.: 64 and 16.
        slope: a at the start.
        offset: b at the start.
        floor: c, the smallest weight; Qu et al.: 0.
        max_slope: largest a; at it a pair's slope has no gradient. Qu et al.: None.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (64, 16),
        slope: float = 1.0,
        offset: float = 0.0,
        floor: float = 0.0,
        max_slope: float | None = None,
    ):
        super().__init__()
        self.floor, self.max_slope = floor, max_slope
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
        """Set the last layer's bias, a and b of every pair while its weight is 0."""
        self._last.bias.copy_(torch.tensor([slope, offset]))

    def forward(self, delta: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (N,) weights g, slopes a and offsets b of (N,) Delta and u.

        No gradient flows into the rewards (appendix A).
        """
        with torch.autocast(u.device.type, enabled=False):
            inputs = torch.stack([delta, u], dim=1).detach().to(self._last.weight.dtype)
            a, b = self.layers(inputs).unbind(1)
            if self.max_slope is not None:
                a = a.clamp(max=self.max_slope)
            g = torch.sigmoid(a * inputs[:, 1] + b)
            return self.floor + (1 - self.floor) * g, a, b


def save_vnet(folder: str | Path, vnet: VNet, settings: dict[str, Any]) -> None:
    """Write VNet and the run's JSON ``settings`` into an existing folder."""
    hidden = [layer.out_features for layer in vnet.layers if isinstance(layer, nn.Linear)][:-1]
    shape = {"hidden": hidden, "floor": vnet.floor, "max_slope": vnet.max_slope, "inputs": ["delta", "u"]}
    shape |= {"outputs": ["a", "b"], "weight": "floor + (1 - floor) sigmoid(min(a, max_slope) u + b)"}
    text = json.dumps(shape | settings, indent=2, ensure_ascii=False)
    (Path(folder) / CONFIG).write_text(text + "\n", encoding="utf-8")
    save_file({name: value.cpu() for name, value in vnet.state_dict().items()}, Path(folder) / WEIGHTS)


def load_vnet(folder: str | Path) -> VNet:
    """Return the VNet that ``pacmr export`` wrote; call it with (N,) Delta and (N,) u in nats for (g, a, b).

    Implicit rewards need the run's beta: see ``vnet_config.json``.

    Raises:
        UserError: the folder holds no VNet, or its files are broken or do not fit each other.
    """
    folder = local_path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        vnet = VNet(config["hidden"], floor=config["floor"], max_slope=config["max_slope"])
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
