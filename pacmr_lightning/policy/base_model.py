"""The frozen base model that policy and reference share: its loading, saving, and how its layers run."""

import copy
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from lightning.pytorch.utilities import rank_zero_info
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _CachedTorchDispatchMode, create_selective_checkpoint_contexts
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import find_adapter_config_file

from ..errors import UserError, first_line, is_out_of_memory
from ..strategies.sharding import whole
from .attention import use_attention
from .chat_template import stop_at_end_tokens
from .hub_access import locate
from .lora_layer import PolicyLora
from .merged_adapters import merge_adapter
from .numerics import Recomputed, not_finite
from .quantized import AskedQuantization, prepare_quantized, quantization_options

RECOMPILATIONS = 64
"""Limit per function; past it torch silently runs slowly."""


def load_base(
    name: str,
    dtype: torch.dtype,
    attention: str | None = None,
    quantization: AskedQuantization | None = None,
    dropout: bool = False,
) -> PreTrainedModel:
    """Return a causal language model; adapters are merged and compared with their unmerged form.

    Args:
        name: folder or Hub id of a model, or of a PEFT adapter on one.
        dtype: of the weights.
        attention: as in transformers; None for its default.
        quantization: of the linear layers except the head.
        dropout: keep the model's dropout instead of disabling it.
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
            base, revision = adapter_base(name), PeftConfig.from_pretrained(name).revision
            # On whatever device it is loaded, where GPU kernels may not run.
            model = merge_adapter(_pretrained(base, dtype=dtype, revision=revision), name, base)
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
    if damaged := not_finite(model.state_dict()):
        raise UserError(
            f"The model {name} has weights that are not finite in {dtype}, such as {damaged}; take another "
            "copy of it, or float32."
        )
    if not dropout:
        _switch_off_dropout(model)
    _mend_generation_config(model, name)
    return model


def _pretrained(name: str, **options: Any) -> PreTrainedModel:
    # Unless false, transformers asks on the terminal.
    options["trust_remote_code"] = False
    _config(name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
    model, loading_info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if missing := sorted(loading_info["missing_keys"]):
        raise UserError(
            f"The model {name} lacks {len(missing)} weights of {type(model).__name__}, the first being "
            f"{missing[0]}; name a causal language model with its head."
        )
    return model


def _config(name: str) -> Any:
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.is_encoder_decoder:
        raise UserError(f"The model {name} is an encoder-decoder; name a causal language model.")
    return config


@contextmanager
def _loading(name: str, attention: str | None = None) -> Iterator[None]:
    if Path(name).is_file():
        raise UserError(f"The model {name} is a file; name a folder that save_pretrained wrote, or a Hub id.")
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # safetensors, pickle and quantizers have their own
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
        return "the weights have other shapes than in its config.json; use the files of one model."
    if isinstance(error, SafetensorError):
        return f"a safetensors file is incomplete or is none ({first_line}); download it again."
    return first_line


def is_adapter(name: str) -> bool:
    """True if a folder or Hub id is a PEFT adapter."""
    with _loading(name):
        return find_adapter_config_file(locate(name)) is not None


def adapter_base(name: str) -> str:
    """Return the folder or Hub id of an adapter's base; raise UserError if that is an adapter itself."""
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
        is_plain = not is_adapter(base)
    except UserError as error:
        raise UserError(
            f"The adapter {name} was trained on {base}, which is not there ({str(error).rstrip('.')}); set "
            "base_model_name_or_path in its adapter_config.json."
        ) from None
    if not is_plain:
        raise UserError(
            f"The adapter {name} was trained on {base}, which is an adapter itself; merge that one into its "
            "own base first (PEFT's merge_and_unload), and name the merged model as base_model_name_or_path "
            "in adapter_config.json."
        )
    return str(base)


def plain_model(name: str) -> str:
    """Return the name of a model, or of an adapter's base."""
    return adapter_base(name) if is_adapter(name) else name


def parameter_count(name: str) -> int:
    """Return the number of parameters of a model, or of an adapter's base, without loading weights."""
    with _loading(name), torch.device("meta"):
        return AutoModelForCausalLM.from_config(_config(plain_model(name))).num_parameters()


def _switch_off_dropout(model: PreTrainedModel) -> None:
    for holder in (model.config, *model.modules()):
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
        if isinstance(holder, nn.Module) and "Router" in type(holder).__name__:
            # Phi-MoE draws its experts in training mode.
            holder.eval().train = partial(_unchanged, holder)  # type: ignore[method-assign]
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and is_random(name):
                setattr(holder, name, 0.0)


def is_random(name: str) -> bool:
    """True for the name of a module's or config's dropout, or of another chance in training."""
    # OPT skips whole layers; Mixtral, MiniMax and DBRX add noise to a router's inputs.
    return bool(re.search("dropout|(pdrop|layerdrop|input_jitter_noise|moe_jitter_eps|^jitter_noise)$", name))


def _unchanged(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _mend_generation_config(model: PreTrainedModel, name: str) -> None:
    """Make a generation config valid where transformers loads it but would refuse to save it.

    Sampling options without ``do_sample``, as of Llama 2, get it; else special tokens alone are kept.
    """
    if (config := model.generation_config) is None or _is_valid(config):
        return
    config.do_sample, what = True, "do_sample is set to true"
    if not _is_valid(config) or config.temperature == 0:
        special = {k: v for k, v in config.to_diff_dict().items() if k.endswith("_token_id")}
        model.generation_config, what = GenerationConfig(**special), "its special tokens alone are kept"
    rank_zero_info(f"The generation_config.json of {name} is one that transformers does not save; {what}.")


def _is_valid(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def check_savable(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise UserError, before the training, if a library would refuse to save the model's folder.

    Configs and tokenizer are written to a temporary folder. Weights of a whole model are only checked for
    sharing that safetensors refuses.
    """
    plain: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model  # type: ignore[assignment]
    try:
        generation = copy.deepcopy(plain.generation_config)
        stop_at_end_tokens(generation, tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            for part in (plain.config, generation, tokenizer):
                part.save_pretrained(folder)
            if isinstance(model, PeftModel):
                for config in model.peft_config.values():
                    config.save_pretrained(folder)
            else:
                remove_tied_weights_from_state_dict(dict(model.state_dict()), model)
    except Exception as error:  # each library has its own
        raise UserError(
            f"The model {name} could not be saved after the training ({first_line(error)}); mend its "
            "config.json, generation_config.json or tokenizer, or name another model."
        ) from None


def weights_digest(model: PreTrainedModel) -> str:
    """Return a 128-bit XXH3 hash of the weights without LoRA, the same on every device and strategy."""
    digest = xxhash.xxh3_128()
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if "lora_" in name:
                continue
            with whole([value]):
                digest.update(name.encode() + str(value.dtype).encode() + str(tuple(value.shape)).encode())
                # Detached: .cpu() of bitsandbytes' own class also moves its layer's scales.
                plain = value.detach().contiguous().cpu()
                digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def recompute_activations(
    model: PreTrainedModel, recomputed: Recomputed = True, dropout: bool = False
) -> None:
    """Turn activation checkpointing on or off; ``dropout`` saves the random state with it."""
    # transformers' older name is gradient checkpointing.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if recomputed and not model.supports_gradient_checkpointing:
        raise UserError(
            f"{type(model).__name__} cannot recompute activations; set gradient_checkpointing to false."
        )
    for module in model.modules():
        if isinstance(module, PolicyLora):
            module.in_place = recomputed != "selective"
    if not recomputed:
        getattr(model, f"{kind}_checkpointing_disable")()
        return
    more = {"context_fn": _keeping} if recomputed == "selective" else {}
    options = {"use_reentrant": False, "preserve_rng_state": dropout, **more}
    getattr(model, f"{kind}_checkpointing_enable")(options)


def _keeping() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a layer's first pass, which stores what is kept, and of its recomputation."""
    first, _ = create_selective_checkpoint_contexts(_is_kept)
    return first, _KeptAlone(_is_kept, first.storage)


def _is_kept(_: object, operation: torch._ops.OpOverload, *args: Any, **options: Any) -> bool:
    return bool(re.search(r"^aten::(add|_grouped_)?mm$|attn|attention", operation.name()))


class _KeptAlone(_CachedTorchDispatchMode):
    """torch's also counts the other operations, which are not the same where ZeRO-3 gathers parameters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_kept(None, func):
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except RuntimeError as error:
                if "mutated" not in str(error):  # as GPT-OSS adds biases to products in place
                    raise
        return func(*args, **kwargs or {})


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each of the model's layers; layers share compiled code.

    Single pairs' gradients are handed to Python, so layers that take them run uncompiled, as does generation.
    Adapter, shift, gradients and each number of rows and tokens that torch does not take as dynamic have a
    graph of their own.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no layers that can be compiled; set compile to false.")
    torch._dynamo.config.specialize_float = True  # LoRA's scaling as a number, not as an input
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    for layer in layers:
        own = [module for module in layer.modules() if isinstance(module, PolicyLora)]
        layer.forward = partial(_run_layer, own, layer.forward, torch.compile(layer.forward, dynamic=True))


def _run_layer(
    layers: list[PolicyLora],
    plain: Callable[..., Any],
    compiled: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    per_pair = any(layer.per_pair is not None for layer in layers)
    generation = any(isinstance(value, Cache) for value in kwargs.values())
    return (plain if per_pair or generation else compiled)(*args, **kwargs)
