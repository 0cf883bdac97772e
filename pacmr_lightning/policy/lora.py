"""What the method needs of a LoRA adapter: plain linears in fp32 that start as the identity."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from ..errors import UserError

ADAPTER = "default"


class UnhookedLoraError(UserError):
    """A LoRA layer's linears are not called on whole rows, so that hooks on them miss what it does."""


def check_hooked(layers: Mapping[str, LoraLayer]) -> None:
    """Check that each LoRA layer calls its linears, on which hooks move parameters and see gradients.

    LoRA on a tensor of experts' weights (PEFT's ``ParamWrapper``) does not: it adds the product of its
    matrices to the weights.

    Args:
        layers: all LoRA layers by name.

    Raises:
        UnhookedLoraError: a layer does not; names it, and linear layers to target instead.
    """
    wrapped = {name: layer for name, layer in layers.items() if isinstance(layer, ParamWrapper)}
    if not wrapped:
        return
    name, layer = next(iter(wrapped.items()))
    linears = sorted({name.rpartition(".")[2] for name in layers.keys() - wrapped.keys()})
    raise UnhookedLoraError(
        f"The LoRA layer {name} is on the parameter {layer.parameter_name} of a mixture of experts, for "
        "which neither single pairs' gradients nor the virtual step are computed; set the policy's "
        f"target_modules to {'[' + ', '.join(linears) + ']' if linears else 'the names of linear layers'}."
    )


def lora_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The A and B linears of every LoRA layer, by the name of their weight in ``named_parameters``."""
    linears = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            for part in ("lora_A", "lora_B"):
                linears[f"{name}.{part}.{ADAPTER}.weight"] = getattr(layer, part)[ADAPTER]
    return linears


def check_lora(model: PeftModel) -> None:
    """Checks that shifting the LoRA linears' outputs is the same as shifting every trainable parameter.

    Raises:
        UserError: a LoRA variant (DoRA and others) bypasses the linears, something else than them is
            trainable, or the adapter does not start at the reference.
        AssertionError: an adapter weight is not in fp32 (or float64).
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        variant = layer.lora_variant.get(ADAPTER)
        if variant is not None or ADAPTER not in layer.lora_A:
            kind = type(variant or layer).__name__
            raise UserError(
                f"The LoRA variant {kind} (layer {name}) bypasses the plain LoRA linears, which this method "
                "shifts; remove it from lora_options (use_dora: false) and target linear layers only."
            )
    linears = lora_linears(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name not in linears:
            raise UserError(
                f"The parameter {name} is trainable but is no LoRA linear's weight; remove bias, lora_bias "
                "and modules_to_save from lora_options."
            )
        assert parameter.dtype in (torch.float32, torch.float64), f"{name} is {parameter.dtype}, not fp32"
        if ".lora_B." in name and parameter.detach().any():
            raise UserError(
                "The adapter does not start as the identity, so the policy would not start at the reference; "
                "remove init_lora_weights from lora_options."
            )
