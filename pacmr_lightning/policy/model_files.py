"""Files of a model's folder: checks before the training, and one rounding when adapters are merged."""

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ..errors import UserError, first_line
from .chat_template import stop_at_end_tokens
from .memory import free_memory
from .merged_adapters import untie_head
from .numerics import not_finite

KEPT = 0.95
"""Share of an adapter's effect under which a message names the remedy."""


def mend_generation_config(model: PreTrainedModel, name: str) -> None:
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


def merge_rounded(
    model: Any,
    dtype: torch.dtype,
    values: Callable[[], Tensor] | None,
    effect: Tensor | None = None,
) -> tuple[PreTrainedModel, float | None]:
    """Merge an adapter in place, in float32, and round once to ``dtype``.

    Args:
        model: a ``PeftModel``.
        dtype: of the merged weights.
        values: returns (n,) values of the model as it is, such as log-probabilities; None: not measured.
        effect: (n,) the adapter's effect on them; None measures it here.

    Returns:
        The merged model, and the share of the effect that is left: the slope of the merged model's effect on
        the adapter's. None if it is not measured: no ``values``, no effect on them, or no memory for the
        weights in float32.

    Raises:
        UserError: a merged weight is not finite in ``dtype``.
    """
    parameters = sum(p.numel() for p in model.parameters())
    measured = values is not None and (4 - model.dtype.itemsize) * parameters < free_memory()
    if measured or dtype != model.dtype:
        model.float()
    with torch.no_grad():
        if values is not None and measured:
            with model.disable_adapter():
                reference = values().double()
            effect = values().double() - reference if effect is None else effect.double()
        untie_head(model.get_base_model())
        merged: Any = model.merge_and_unload().to(dtype)
        if name := not_finite(merged.state_dict()):
            raise UserError(f"The merged weight {name} overflows {dtype}; choose another --dtype.")
        if values is None or effect is None or not measured or not effect.any():
            return merged, None
        merged.float()
        share = float((values().double() - reference) @ effect / (effect @ effect))
        return merged.to(dtype), share
