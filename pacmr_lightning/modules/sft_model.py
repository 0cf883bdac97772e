"""The model of supervised fine-tuning: how it is made, and how it is saved."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..chat_template import stop_at_end_tokens
from ..errors import UserError
from ..policy.base_model import load_base
from ..policy.merged_adapters import untie_head

OWN_KEYS = dict.fromkeys(
    ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"), "the tokenizer sets it; leave it out"
) | {"dtype": "set the module's dtype instead"}
"""Keys of LlamaConfig that are not the user's to set, and what to do about each."""


def new_llama(
    options: dict[str, Any], tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> PreTrainedModel:
    """A randomly initialized Llama model with the tokenizer's vocabulary and special tokens.

    Args:
        options: keys of ``LlamaConfig``, none of ``OWN_KEYS``.
        tokenizer: what the model will read.
        dtype: of the weights.

    Raises:
        UserError: the options do not describe a model.
    """
    try:
        config = LlamaConfig(
            **options,
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    except StrictDataclassError as error:
        reason = str(error).strip().splitlines()[-1].strip().rstrip(".")
        raise UserError(
            f"from_scratch does not describe a Llama model ({reason}); change that value."
        ) from None
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def load_pretrained(name: str, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> PreTrainedModel:
    """A pretrained causal language model that knows all tokens of the tokenizer.

    Args:
        name: folder or Hub id.
        tokenizer: loaded, not newly trained.
        dtype: of the weights.

    Raises:
        UserError: there is no such model, or the tokenizer is not one of its own kind.
    """
    if not tokenizer.name_or_path:
        raise UserError(
            f"The model {name} is pretrained, but the tokenizer is a new one, whose tokens it does not know; "
            f"set the datamodule's tokenizer to {name}."
        )
    path = Path(name).expanduser()
    model = load_base(str(path) if path.is_dir() else name, dtype, dropout=True)
    rows = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    if len(tokenizer) > rows:
        raise UserError(
            f"The tokenizer {tokenizer.name_or_path} has {len(tokenizer)} tokens, but the model {name} knows "
            f"{rows}; set the datamodule's tokenizer to {name}."
        )
    if model.config.pad_token_id is None:
        model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def save_model(folder: Path, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Saves model and tokenizer as a Hugging Face folder that takes the place of an older one.

    An adapter is merged into its base, in a copy: the model itself stays as it is. The folder is written
    under another name first, so nobody reads a part of it. Its generation config stops where ``predict``
    does.
    """
    plain: Any = model
    if isinstance(model, PeftModel):
        adapted: Any = copy.deepcopy(model)
        untie_head(adapted.get_base_model())
        plain = adapted.merge_and_unload()
    stop_at_end_tokens(plain.generation_config, tokenizer)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    plain.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if folder.exists():
        os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)
