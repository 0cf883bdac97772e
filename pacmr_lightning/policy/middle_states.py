"""Hidden states after a model's middle layer, without the layers above it."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


class _Enough(Exception):
    """Ends a forward pass."""


def middle_states(model: PreTrainedModel, inputs: dict[str, Any], stop: bool = True) -> Tensor:
    """Return (B, L, H) states after half of the layers, rounded up.

    ``stop`` false runs all layers, as does a model whose layers are no plain list.
    """
    number = model.config.get_text_config().num_hidden_layers
    half = (number + 1) // 2
    lists = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == number]
    if not stop or len(lists) != 1 or half == number:
        return model.base_model(**inputs, output_hidden_states=True).hidden_states[half]
    found: list[Tensor] = []

    def read(_: nn.Module, __: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)
        raise _Enough

    handle = lists[0][half - 1].register_forward_hook(read)
    try:
        model.base_model(**inputs)
    except _Enough:
        pass
    finally:
        handle.remove()
    return found[0]
