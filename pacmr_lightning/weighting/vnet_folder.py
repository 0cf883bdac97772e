"""VNet in two files that need no run: its weights as safetensors, and what it is as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..errors import UserError
from .vnet import VNet

WEIGHTS = "vnet.safetensors"
CONFIG = "vnet_config.json"


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
