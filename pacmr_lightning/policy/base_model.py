"""The frozen base that a policy and its reference share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from lightning.pytorch.utilities import rank_zero_info
from peft import AutoPeftModelForCausalLM
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import find_adapter_config_file

from ..errors import UserError
from ..strategies.sharding import whole
from .quantized import AskedQuantization, prepare_quantized, quantization_options


def load_base(
    name: str, dtype: torch.dtype, attention: str | None, quantization: AskedQuantization | None = None
) -> PreTrainedModel:
    """Loads a model without dropout; a PEFT adapter is merged into its base.

    Args:
        name: folder or Hub id.
        dtype: of its weights.
        attention: as in transformers, whose own choice None is.
        quantization: of its linear layers but the head.

    Raises:
        UserError: the model cannot be loaded, or does not support the attention or the quantization.
    """
    adapter = is_adapter(name)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if quantization is not None:
        if adapter:
            raise UserError(
                f"The model {name} is an adapter, which would be rounded where it is merged into 4 bits; "
                "merge it first (pacmr export RUN OUT --merged, or PEFT's merge_and_unload) and name the "
                "merged model."
            )
        options |= quantization_options(dtype)
    try:
        if adapter:
            rank_zero_info(f"Merging the adapter {name} into its base.")
            model = _merged(name, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(name, **options)
    except (OSError, ImportError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        about_attention = isinstance(error, ImportError) or "attention" in first_line.lower()
        if attention not in (None, "sdpa") and about_attention:
            sentence = first_line.split(". ")[0].rstrip(".")
            raise _cannot_be_loaded(
                name, f"{sentence}; or set attn_implementation to sdpa or auto."
            ) from None
        if isinstance(error, ValueError) and quantization is None:
            raise
        raise _cannot_be_loaded(name, error) from None
    if quantization is not None:
        prepare_quantized(model, dtype)
    elif getattr(model, "is_loaded_in_4bit", False):
        raise UserError(
            f"The model {name} is stored in 4 bits; set quantization to 4bit to train it (merging needs a "
            "model that is stored in full)."
        )
    _switch_off_dropout(model)
    return model


def is_adapter(name: str) -> bool:
    """Whether a folder or Hub id is a PEFT adapter and no model of its own.

    Raises:
        UserError: there is no such folder, or the Hub has nothing of that name.
    """
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).is_dir():
        raise UserError(f"The model folder {name} does not exist; run SFT first or name another.")
    try:
        return find_adapter_config_file(name) is not None
    except OSError as error:
        raise _cannot_be_loaded(name, error) from None


def _cannot_be_loaded(name: str, reason: object) -> UserError:
    return UserError(f"The model {name} cannot be loaded: {str(reason).strip().splitlines()[0]}")


def _merged(name: str, **options: Any) -> PreTrainedModel:
    """An adapter's base with the adapter inside of its weights.

    Raises:
        UserError: this kind of adapter is no change of weights, or the base is stored in 4 bits.
    """
    model = AutoPeftModelForCausalLM.from_pretrained(name, **options)
    kind = model.peft_config["default"]
    if not hasattr(model, "merge_and_unload"):
        raise UserError(
            f"The adapter {name} is of PEFT's kind {kind.peft_type.value}, which cannot be merged into the "
            "model that it was trained on; name a LoRA adapter, or a whole model."
        )
    if getattr(model.get_base_model(), "is_loaded_in_4bit", False):
        raise UserError(
            f"The adapter {name} was trained on {kind.base_model_name_or_path}, which is stored in 4 bits, "
            "where it would be rounded away; load that model in full, put the adapter on it (PEFT's "
            "PeftModel.from_pretrained and merge_and_unload), save it, and name its folder."
        )
    return cast("PreTrainedModel", model.merge_and_unload())


def _switch_off_dropout(model: PreTrainedModel) -> None:
    """Of layers, and of the probabilities that attention keeps as numbers."""
    for holder in (model.config, *model.modules()):
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(holder, name, 0.0)


def weights_digest(model: PreTrainedModel) -> str:
    """Return a hash (XXH3, 128 bits) of the model's weights, by name and byte; LoRA is no part of it.

    It is the same on every device and under every strategy. Another dtype or quantization makes other bytes.
    """
    digest = xxhash.xxh3_128()
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if "lora_" in name:
                continue
            with whole([value]):
                digest.update(name.encode() + str(value.dtype).encode() + str(tuple(value.shape)).encode())
                # Detached it is a plain tensor; bitsandbytes' own takes its layer's scales along to the CPU.
                plain = value.detach().contiguous().cpu()
                digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def recompute_activations(model: PreTrainedModel, recomputed: bool = True) -> None:
    """Sets whether activations inside of a layer are computed again in backward, or kept."""
    # transformers calls activation checkpointing what it called gradient checkpointing at first.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if recomputed:
        getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{kind}_checkpointing_disable")()
