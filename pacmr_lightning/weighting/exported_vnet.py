"""A VNet's files, as ``pacmr export`` writes them."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..errors import UserError, first_line
from ..files import local_path
from .algorithm_1 import VNet

WEIGHTS = "vnet.safetensors"
CONFIG = "vnet_config.json"


def save_vnet(folder: str | Path, vnet: VNet, settings: dict[str, Any]) -> None:
    """Write VNet and the run's JSON ``settings`` into an existing folder."""
    hidden = [layer.out_features for layer in vnet.layers if isinstance(layer, nn.Linear)][:-1]
    shape = {"hidden": hidden, "floor": vnet.floor, "max_slope": vnet.max_slope, "inputs": ["delta", "u"]}
    shape |= {"outputs": ["a", "b"], "weight": "floor + (1 - floor) sigmoid(min(a, max_slope) u + b)"}
    text = json.dumps(shape | settings, indent=2, ensure_ascii=False)
    (Path(folder) / CONFIG).write_text(text + "\n", encoding="utf-8")
    save_file({name: value.cpu() for name, value in vnet.state_dict().items()}, Path(folder) / WEIGHTS)


def load_vnet(folder: str | Path) -> VNet:
    """Return the VNet that ``pacmr export`` wrote; call it with (N,) Delta and (N,) u for (g, a, b).

    They are in nats times the run's beta, which is in ``vnet_config.json``.

    Raises:
        UserError: the folder holds no VNet, or its files are broken or do not fit each other.
    """
    folder = local_path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        vnet = VNet(config["hidden"], floor=config["floor"], max_slope=config["max_slope"])
        vnet.load_state_dict(load_file(folder / WEIGHTS))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder} holds no VNet ({CONFIG}, {WEIGHTS}); name a folder that pacmr export made of a run "
            "whose weighting learns."
        ) from None
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = first_line(error).rstrip(".:")
        raise UserError(f"The VNet in {folder} cannot be loaded ({reason}); export it again.") from None
    return vnet
