"""A frozen base whose linear layers are kept in 4 bits (QLoRA, arXiv 2305.14314), by bitsandbytes."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from ..errors import UserError

AskedQuantization = Literal["4bit"]


def check_quantization(asked: AskedQuantization | None) -> None:
    """Looks for the package before anything is loaded.

    Raises:
        UserError: the option has another value, or bitsandbytes is not installed.
    """
    if asked not in (None, "4bit"):
        raise UserError(f"quantization is {asked}, but it must be 4bit, or null for none.")
    if asked is not None and find_spec("bitsandbytes") is None:
        raise UserError(
            "quantization is 4bit, which needs bitsandbytes; install it: pip install "
            "'pacmr-lightning[quantization]'."
        )


def quantization_options(dtype: torch.dtype) -> dict[str, Any]:
    """What ``from_pretrained`` needs for NF4 with quantised scales, computed in ``dtype``.

    The model lies where a plain one would, on torch's default device (under Lightning the trainer's own), and
    not on the GPU that transformers would choose for it.
    """
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": torch.get_default_device()}}


def prepare_quantized(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Lets the model's 4-bit layers compute in ``dtype``, forward and backward, whenever they are called.

    Of PEFT's ``prepare_model_for_kbit_training`` nothing is needed. It casts norms, embeddings and head to
    fp32, for training under autocast: here they are frozen in ``dtype`` as those of any base, transformers'
    norms compute in fp32 by themselves, and the adapter is fp32 anyway. It lets the embeddings' output
    require a gradient, for reentrant checkpoints: ours are not (``recompute_activations``).

    Raises:
        UserError: the model has no 4-bit layer, or one whose scales bitsandbytes confuses on a CPU.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no layer to keep in 4 bits; set quantization to null.")
    for layer in layers:
        state = cast(Params4bit, layer.weight).quant_state
        # Its AVX-512 code counts the scales by row, and rounds down where rows are no whole blocks.
        if layer.weight.device.type == "cpu" and state.shape[-1] % state.blocksize:
            raise UserError(
                f"{type(model).__name__} has a layer of {state.shape[-1]} inputs, no multiple of "
                f"{state.blocksize}, which bitsandbytes computes wrongly on CPUs; set quantization to null."
            )
        # A model that was stored in 4 bits has its own dtypes, of the forward and of the backward pass.
        layer.compute_dtype, layer.compute_type_is_set = dtype, True
        state.dtype = dtype
        # On CPUs with AVX512-BF16 a layer would pack its weights anew in the first pass in eval mode, for a
        # product that has no gradient, and stay so in training.
        layer.support_avx512bf16_for_cpu = False


def quantized_numerics(asked: AskedQuantization | None) -> dict[str, str]:
    """For keys of kept values: how weights are rounded, and by what; nothing for a plain base."""
    return {} if asked is None else {"quantization": f"{asked}, bitsandbytes {version('bitsandbytes')}"}
