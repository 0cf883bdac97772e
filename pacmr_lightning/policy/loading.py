"""Pretrained causal language models, and one sentence in place of what loading raises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..errors import UserError, is_out_of_memory


def pretrained(name: str, **options: Any) -> PreTrainedModel:
    """Return a causal language model, all of whose weights were in its files.

    Args:
        name: folder or Hub id.
        options: of transformers' ``from_pretrained``.

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
def loading(name: str, attention: str | None = None) -> Iterator[None]:
    """Turn what loading a model raises into a ``UserError``.

    Args:
        name: folder or Hub id.
        attention: what was asked for, as in transformers.

    Raises:
        UserError: the model cannot be loaded.
    """
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
