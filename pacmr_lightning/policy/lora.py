"""The policy's LoRA adapter: options, construction and checks."""

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import UserError
from .lora_layer import ADAPTER, LAYERS, PolicyLora

_PLACES = ("exclude_modules", "layers_pattern", "layers_to_transform", "target_parameters")
PLAIN_KEYS = frozenset((*_PLACES, "alpha_pattern", "init_lora_weights", "rank_pattern", "use_rslora"))
"""Keys of ``peft.LoraConfig`` with which an adapter is A and B alone."""
_MORE = ("bias", "lora_bias", "lora_dropout", "modules_to_save", "trainable_token_indices", "use_dora")
SFT_KEYS = PLAIN_KEYS.union(("r", "lora_alpha", "target_modules", "ensure_weight_tying"), _MORE)
"""Keys of ``peft.LoraConfig`` in SFT."""


def check_keys(
    option: str, given: Mapping[str, Any] | None, known: Set[str], remedies: Mapping[str, str], defaults: Any
) -> None:
    """Raise UserError for a key that is not ``known``, with its remedy, unless its value is the default."""
    for key, value in (given or {}).items():
        harmless = key not in remedies and hasattr(defaults, key) and getattr(defaults, key) == value
        if key not in known and not harmless:
            keys, remedy = ", ".join(sorted(known)), remedies.get(key, "remove it")
            raise UserError(f"{option} has the key {key!r}, but it takes {keys}; {remedy}.")


def add_lora(
    model: PreTrainedModel, options: Mapping[str, Any], option: str, custom: bool = False
) -> PeftModel:
    """Freeze the model and add a LoRA adapter in fp32; ``option`` names its ``options`` in messages.

    If ``custom``, linear layers get a ``PolicyLora``.
    """
    if (initial := options.get("init_lora_weights")) in ("corda", "eva", "loftq", "lora_ga"):
        raise UserError(
            f"{option} has init_lora_weights {initial}, which needs data or weights that are not given "
            "here; leave it out."
        )
    kind, names = type(model).__name__, [f".{name}" for name, _ in model.named_modules()]
    # PEFT ignores a name without a match if another one matches.
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        listed = options[key] if isinstance(options.get(key), (list, tuple, set)) else ()
        for one in listed:
            if not any(name.endswith(f".{one}") for name in names):
                fix = _other_targets(model, listed) if key == "target_modules" else "leave it out"
                raise UserError(f"{key} names {one}, but {kind} has no such module; {fix}.")
    asked, targets = options.keys() - {"r", "target_modules"}, options["target_modules"]
    if options.get("layers_to_transform") is not None and targets == "all-linear":
        options = {**options, "target_modules": linear_names(model)}  # PEFT takes layers of a list alone
    others = _without_adapters(model)
    if others and targets != DUMMY_TARGET_MODULES:
        rank_zero_info(f"{kind} gets no adapter in {', '.join(others)}.")
        own = options.get("exclude_modules") or []
        own = own if isinstance(own, str) else _below(own)
        options = {**options, "exclude_modules": f"({own})|({_below(others)})"}
    try:
        # By the CPU's generator: Lightning makes models on the GPU, whose own ZeRO-3 has used by then.
        with torch.device("cpu"), warnings.catch_warnings():
            # PEFT only warns of an option without effect.
            for key in asked:
                warnings.filterwarnings("error", rf"(?s).*\b{key}\b")
            config = LoraConfig(**options)
            config.fan_in_fan_out = any(isinstance(module, Conv1D) for module in model.modules())
            if custom:
                config._register_custom_module(LAYERS)
            adapted = get_peft_model(model, config)
    except (ValueError, TypeError, AttributeError, NotImplementedError, ImportError, Warning) as error:
        said = " ".join(str(error).split()).rstrip(".")
        given, fix = option, "set target_modules to a list of names" if "is a str" in said else "change it"
        if "layers_" not in said and re.match("Target module|.*Mamba-based", said):
            given, fix = f"target_modules {targets}", _other_targets(model, targets, said)
        raise UserError(f"{given} cannot be used with this model ({said[:200]}); {fix}.") from None
    if os.path.isdir(base := str(config.base_model_name_or_path)):
        config.base_model_name_or_path = os.path.abspath(base)  # saved adapters are loaded from elsewhere
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad and "lora_" not in n]
    if config.bias != "none" and not any(name.endswith("bias") for name in trained):
        raise UserError(f"{option} has bias {config.bias}, but there is no bias to train; leave it out.")
    layers = options.get("layers_to_transform")
    for layer in [layers] if isinstance(layers, int) else layers or []:
        if not any(f".{layer}." in name for name in adapted.targeted_module_names):
            raise UserError(f"{option} has layer {layer} in layers_to_transform, which adapts nothing there.")
    return adapted


def linear_names(model: PreTrainedModel) -> list[str]:
    """Return the last name parts of the language model's linear layers except head and routers."""
    config: Any = _maybe_include_all_linear_layers(LoraConfig(target_modules="all-linear"), model)
    others = _below(_without_adapters(model))
    last = {name.rpartition(".")[2] for name in config.target_modules if not re.fullmatch(others, name)}
    return sorted(name for name in last if not name.isdigit())  # a number would name whole layers


def other_parts(model: PreTrainedModel) -> list[str]:
    """Return the names of parts beside the language model that text does not run, such as a vision tower."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder in (model, model.base_model, head):
        return []
    names = {module: name for name, module in model.named_modules()}
    siblings = model.get_submodule(names[decoder].rpartition(".")[0]).children()
    return [names[part] for part in siblings if part not in (decoder, head) and [*part.parameters()]]


def _without_adapters(model: PreTrainedModel) -> list[str]:
    """Return names of other parts, and last names of routers, which return several tensors."""
    routers = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "Router" in type(module).__name__
    }
    return [*other_parts(model), *sorted(routers)]


def _below(names: Iterable[str]) -> str:
    """Return a regular expression of modules with these last names, and all below them."""
    return rf"(.*\.)?({'|'.join(map(re.escape, names))})(\..*)?" if names else r"(?!)"


def _other_targets(model: PreTrainedModel, given: object, without: str = "") -> str:
    names = ", ".join(name for name in linear_names(model) if repr(name) not in without)
    whole = "" if given == "all-linear" else "all-linear, "
    return f"set it to {whole}some of [{names}] or a regular expression of whole names"


def check_lora(model: PeftModel) -> None:
    """Raise UserError unless the adapter is on linear layers, or experts, and starts as the identity."""
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if not isinstance(layer, (PolicyLora, ParamWrapper)):
            raise UserError(
                f"target_modules has {name}, where PEFT's layer is of the kind {type(layer).__name__}, but "
                "this method takes adapters on linear layers; leave it out, or set it to all-linear."
            )
        if layer.lora_B[ADAPTER].weight.any():  # type: ignore[operator]
            raise UserError(
                "The adapter does not start as the identity, so the policy would not start at the reference; "
                "remove init_lora_weights from lora_options."
            )
