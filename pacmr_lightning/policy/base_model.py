"""The frozen base that a policy and its reference share: loaded, with one sentence for what goes wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from peft import PeftConfig
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import find_adapter_config_file

from ..batch import PairBatch
from ..errors import UserError, is_out_of_memory
from ..strategies.sharding import whole
from .attention import use_attention
from .merged_adapters import merge_adapter
from .quantized import AskedQuantization, prepare_quantized, quantization_options


def load_base(
    name: str,
    dtype: torch.dtype,
    attention: str | None = None,
    quantization: AskedQuantization | None = None,
    pair: PairBatch | None = None,
    dropout: bool = False,
) -> PreTrainedModel:
    """Return the plain causal language model that a name stands for; adapters are merged.

    An adapter means what PEFT computes with it: the merged model is compared with the unmerged one. The base
    of an adapter may be an adapter itself.

    Args:
        name: folder or Hub id of a model or of a PEFT adapter.
        dtype: of the weights.
        attention: as in transformers, whose own choice None is.
        quantization: of the linear layers but the head.
        pair: a batch whose first pair a merged adapter is compared on; None for ids from all over the
            vocabulary.
        dropout: leave the model's dropout as it is, and not switch it off.

    Raises:
        UserError: the model cannot be loaded or its adapter not merged, or it does not support the attention
            or the quantization.
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
    with _loading(name, attention):
        if adapter:
            chain = adapter_chain(name)
            # Compared on whatever device it is loaded on, where kernels for GPUs may not run.
            revision = PeftConfig.from_pretrained(chain[-2]).revision
            model = _pretrained(chain[-1], dtype=dtype, revision=revision)
            for base, its_adapter in pairwise(reversed(chain)):
                model = merge_adapter(model, its_adapter, base, pair)
            if attention is not None:
                use_attention(model, attention)
        else:
            model = _pretrained(name, **options)
    if quantization is not None:
        prepare_quantized(model, dtype)
    elif getattr(model, "is_loaded_in_4bit", False):
        raise UserError(
            f"The model {name} is stored in 4 bits; set quantization to 4bit to train it (merging needs a "
            "model that is stored in full)."
        )
    if not dropout:
        _switch_off_dropout(model)
    return model


def _pretrained(name: str, **options: Any) -> PreTrainedModel:
    """A causal language model, all of whose weights were in its files.

    Raises:
        UserError: the model is an encoder-decoder, or its files lack weights, which transformers would draw
            at random.
    """
    # Unless it is false, transformers asks on the terminal whether to run a model's own code.
    options["trust_remote_code"] = False
    if AutoConfig.from_pretrained(name, trust_remote_code=False).is_encoder_decoder:
        raise UserError(f"The model {name} is an encoder-decoder; name a causal language model.")
    # With its information, from_pretrained returns a pair.
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
    model, found = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"The model {name} lacks {len(missing)} weights of {type(model).__name__}, the first being "
            f"{missing[0]}; name a causal language model with its head."
        )
    return model


@contextmanager
def _loading(name: str, attention: str | None = None) -> Iterator[None]:
    """Turn what loading a model raises into a ``UserError``."""
    if Path(name).is_file():
        raise UserError(f"The model {name} is a file; name a folder that save_pretrained wrote, or a Hub id.")
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # safetensors, pickle and the quantisers have exceptions of their own
        if is_out_of_memory(error):
            raise
        raise UserError(f"The model {name} cannot be loaded: {_reason(error, attention)}") from None


def _reason(error: Exception, attention: str | None) -> str:
    said = str(error).strip() or type(error).__name__
    first_line = said.splitlines()[0]
    about_attention = isinstance(error, ImportError) or "attention" in first_line.lower()
    if attention not in (None, "sdpa") and about_attention:
        return f"{first_line.split('. ')[0].rstrip('.')}; or set attn_implementation to sdpa or auto."
    if "trust_remote_code" in said:
        return (
            "it comes with code of its own (auto_map in its config.json), which is not run here; name a "
            "model whose code is in transformers."
        )
    if kind := re.match(r"Unrecognized configuration class <class '[\w.]*\.(\w+)'>", first_line):
        return f"{kind[1]} is not of a causal language model; name one."
    if "ignore_mismatched_sizes" in said or "size mismatch" in said:
        return "the weights have other shapes than its config.json says; use the files of one model."
    if isinstance(error, SafetensorError):
        return f"a safetensors file is incomplete or is none ({first_line}); download it again."
    return first_line


def is_adapter(name: str) -> bool:
    """Whether a folder or Hub id is a PEFT adapter and no model of its own.

    Raises:
        UserError: there is no such folder, or the Hub has nothing of that name.
    """
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).exists():
        raise UserError(
            f"The model folder {name} does not exist; check the path, run SFT first, or give a Hub id."
        )
    with _loading(name):
        return find_adapter_config_file(name) is not None


def adapter_base(name: str) -> str:
    """Folder or Hub id of the model that an adapter was trained on, which may be an adapter itself.

    Raises:
        UserError: the adapter is for another task, or its configuration names no base, or none that is there.
    """
    config = PeftConfig.from_pretrained(name)
    base = config.base_model_name_or_path
    if not base:
        raise UserError(
            f"The adapter {name} does not name the model that it was trained on; set base_model_name_or_path "
            "in its adapter_config.json."
        )
    if config.task_type not in (None, "CAUSAL_LM"):
        raise UserError(
            f"The adapter {name} is for the task {config.task_type}, not for a causal language model; name "
            "another."
        )
    try:
        is_adapter(base)
    except UserError as error:
        raise UserError(
            f"The adapter {name} was trained on {base}, which is not there ({str(error).rstrip('.')}); set "
            "base_model_name_or_path in its adapter_config.json."
        ) from None
    return str(base)


def adapter_chain(name: str) -> list[str]:
    """The name, the base of the adapter that it is, that one's base, ..., and last a plain model.

    Raises:
        UserError: see ``adapter_base``; or the adapters are each other's base.
    """
    chain = [name]
    while is_adapter(chain[-1]):
        base = adapter_base(chain[-1])
        if base in chain:
            raise UserError(
                f"The adapter {base} has itself among its bases; set base_model_name_or_path in its "
                "adapter_config.json to a plain model."
            )
        chain.append(base)
    return chain


def _switch_off_dropout(model: PreTrainedModel) -> None:
    """Of layers, of the probabilities that are kept as numbers, and what else is random in training."""
    # OPT skips whole layers, and Mixtral, MiniMax and DBRX multiply a router's inputs by noise.
    others = ("pdrop", "layerdrop", "input_jitter_noise", "moe_jitter_eps")
    for holder in (model.config, *model.modules()):
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and (
                "dropout" in name or name.endswith(others) or name == "jitter_noise"
            ):
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


def recompute_activations(model: PreTrainedModel, recomputed: bool = True, dropout: bool = False) -> None:
    """Set whether activations inside of a layer are computed again in backward, or kept.

    With ``dropout`` the layers draw random numbers, so that checkpoints keep the generators' state.
    """
    # transformers calls activation checkpointing what it called gradient checkpointing at first.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if recomputed:
        getattr(model, f"{kind}_checkpointing_enable")(
            {"use_reentrant": False, "preserve_rng_state": dropout}
        )
    else:
        getattr(model, f"{kind}_checkpointing_disable")()
