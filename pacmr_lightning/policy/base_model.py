"""The frozen base that a policy and its reference share."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from peft import AutoPeftModelForCausalLM
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..errors import UserError
from ..strategies.sharding import whole
from .quantized import AskedQuantization, prepare_quantized, quantization_options


def load_base(
    name: str, dtype: torch.dtype, attention: str | None, quantization: AskedQuantization | None = None
) -> PreTrainedModel:
    """Loads a model without dropout; a PEFT adapter folder is merged into its base.

    Args:
        name: folder or Hub id.
        dtype: of its weights.
        attention: as in transformers, whose own choice None is.
        quantization: of its linear layers but the head.

    Raises:
        UserError: the model cannot be loaded, or does not support the attention or the quantization.
    """
    folder = Path(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not folder.is_dir():
        raise UserError(f"The model folder {name} does not exist; run SFT first or name another.")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    is_adapter = (folder / "adapter_config.json").exists()
    if quantization is not None:
        if is_adapter:
            raise UserError(
                f"The model {name} is an adapter, which would be rounded where it is merged into 4 bits; "
                "merge it first (pacmr export RUN OUT --merged, or PEFT's merge_and_unload) and name the "
                "merged model."
            )
        options |= quantization_options(dtype)
    try:
        if is_adapter:
            rank_zero_info(f"Merging the adapter {name} into its base.")
            model = AutoPeftModelForCausalLM.from_pretrained(name, **options).merge_and_unload()
        else:
            model = AutoModelForCausalLM.from_pretrained(name, **options)
    except (OSError, ImportError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        about_attention = isinstance(error, ImportError) or "attention" in first_line.lower()
        if attention not in (None, "sdpa") and about_attention:
            sentence = first_line.split(". ")[0].rstrip(".")
            first_line = f"{sentence}; or set attn_implementation to sdpa or auto."
        elif isinstance(error, ValueError) and quantization is None:
            raise
        raise UserError(f"The model {name} cannot be loaded: {first_line}") from None
    if quantization is not None:
        prepare_quantized(model, dtype)
    elif getattr(model, "is_loaded_in_4bit", False):
        raise UserError(
            f"The model {name} is stored in 4 bits; set quantization to 4bit to train it (merging needs a "
            "model that is stored in full)."
        )
    _switch_off_dropout(model)
    return model


def _switch_off_dropout(model: PreTrainedModel) -> None:
    """Of layers, and of the probabilities that attention keeps as numbers."""
    for holder in (model.config, *model.modules()):
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(holder, name, 0.0)


def weights_digest(model: PreTrainedModel) -> str:
    """A hash of the model's weights, by name and byte; a LoRA adapter is no part of it."""
    digest = hashlib.sha256()
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
