"""Frozen base with 4-bit linear layers (QLoRA, arXiv 2305.14314), by bitsandbytes."""

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from ..errors import UserError, check_choice

AskedQuantization = Literal["4bit"]


def check_quantization(asked: AskedQuantization | None) -> None:
    """Raise UserError for another value, or if bitsandbytes is not installed."""
    check_choice(Literal["4bit", None], quantization=asked)
    if asked is not None and find_spec("bitsandbytes") is None:
        raise UserError(
            "quantization is 4bit, which needs bitsandbytes; install it: pip install "
            "'pacmr-lightning[quantization]'."
        )


def quantization_options(dtype: torch.dtype) -> dict[str, Any]:
    """Return ``from_pretrained`` options for NF4 with quantized scales, on torch's default device."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": torch.get_default_device()}}


def prepare_quantized(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make the 4-bit layers compute in ``dtype``, forward and backward.

    With an fp32 adapter and non-reentrant checkpoints, PEFT's own preparation is unnecessary.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no layer to keep in 4 bits; set quantization to null.")
    for layer in layers:
        state = cast(Params4bit, layer.weight).quant_state
        # The AVX-512 kernel miscounts scales of rows that are not whole blocks.
        if layer.weight.device.type == "cpu" and state.shape[-1] % state.blocksize:
            raise UserError(
                f"{type(model).__name__} has a layer of {state.shape[-1]} inputs, no multiple of "
                f"{state.blocksize}, which bitsandbytes computes wrongly on CPUs; set quantization to null."
            )
        # A model stored in 4 bits has its own compute dtypes.
        layer.compute_dtype, layer.compute_type_is_set = dtype, True
        state.dtype = dtype
        # With AVX512-BF16, eval mode would repack weights for a kernel without gradient, and training would
        # keep them.
        layer.support_avx512bf16_for_cpu = False


def quantized_numerics(asked: AskedQuantization | None) -> dict[str, str]:
    """Return cache-key entries for the quantization; empty without it."""
    return {} if asked is None else {"quantization": f"{asked}, bitsandbytes {version('bitsandbytes')}"}
