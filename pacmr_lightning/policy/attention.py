"""Which attention a policy can run on, in the order in which it is tried, and what is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_kernels_available

from ..errors import UserError
from .compiled import allow_recompilations
from .rows import Layout

AskedLayout = Literal["auto", "shared", "separate", "packed"]

FLEX, FLASH = "flex_attention", "flash_attention_2"
PLAIN = ("sdpa", "eager")
"""Made of torch's own operations: on any device, with a gradient that can be differentiated again."""
IN_WORDS = {
    "shared": "a shared prompt",
    "packed": "sequences packed into one row",
    "separate": "one sequence a row",
    "plain": "the model's own, whole logits",
}


@dataclass(frozen=True)
class Way:
    """How log-probabilities are computed."""

    attention: str
    """As in transformers."""
    layout: Layout

    def __str__(self) -> str:
        return f"{IN_WORDS[self.layout]} with {self.attention} attention"


def is_flash(attention: str) -> bool:
    """Whether it is a FlashAttention, which knows causal sequences and no other masks."""
    return "flash" in attention  # by which transformers knows them, the Hub's kernels included


def plain_attention(model: PreTrainedModel) -> str:
    """What transformers takes unasked: torch's SDPA, or its own code for models that SDPA cannot compute."""
    return "sdpa" if model._supports_sdpa else "eager"


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Switches a model's attention.

    Raises:
        ValueError: transformers cannot switch this model's.
        ImportError: its kernels are not there.
    """
    before = model.config._attn_implementation
    if name == before:
        return
    if name == FLEX:
        allow_recompilations()
    model.set_attn_implementation(name)
    if model.config._attn_implementation == before:
        raise ValueError(f"{type(model).__name__} keeps its {before} attention")


def check_attention(attention: str, layout: AskedLayout, dtype: torch.dtype) -> None:
    """Refuses what cannot work, before anything is loaded.

    Raises:
        UserError: the attention is unknown, or a FlashAttention that cannot do what is asked.
    """
    known = ["auto", "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if attention not in known and "/" not in attention:  # with a slash it is a kernel on the Hub
        raise UserError(
            f"attn_implementation is {attention}, but it must be one of {', '.join(known)}, or the Hub id of "
            "a kernel."
        )
    if not is_flash(attention):
        return
    if dtype == torch.float32:
        raise UserError(
            f"{attention} computes in half precision, but the base is float32; set dtype to bfloat16, or "
            "attn_implementation to sdpa."
        )
    if layout == "shared":
        raise UserError(
            f"{attention} cannot honour the mask of the layout shared; set layout to packed or auto, or "
            f"attn_implementation to {FLEX} or sdpa."
        )


def ways(
    model: PreTrainedModel, asked: str, layout: AskedLayout, device: torch.device
) -> tuple[list[Way], list[str]]:
    """What is tried, the fastest first, and why something is not.

    The order is fixed and not timed on the spot, so that a run that goes on, or another process, computes the
    same: block-sparse shared prompts, then FlashAttention without padding, then what transformers takes.

    Args:
        model: loaded with what was asked for, or ("auto") with transformers' own choice.
        asked: ``attn_implementation``.
        layout: which one is asked for.
        device: of the model.
    """
    own = model.config._attn_implementation
    if layout == "auto":
        on_gpu = {FLEX: ["shared"], FLASH: ["packed"]}
        own_layouts = ["packed" if is_flash(own) else "shared", "separate"]
    else:
        on_gpu = {(FLEX if layout == "shared" else FLASH): [layout]}
        own_layouts = list(dict.fromkeys([layout, "separate"]))
    found, notes = [], []
    if asked == "auto" and device.type != "cuda":
        notes.append(f"the model is on the {device.type}")
    elif asked == "auto":
        for attention, layouts in on_gpu.items():
            obstacle = (_no_flex if attention == FLEX else _no_flash)(model)
            if obstacle is None:
                found += [Way(attention, laid_out) for laid_out in layouts]
            else:
                notes.append(f"no {attention}: {obstacle}")
    return found + [Way(own, laid_out) for laid_out in [*own_layouts, "plain"]], notes


def _no_flex(model: PreTrainedModel) -> str | None:
    return None if model._supports_flex_attn else f"{type(model).__name__} does not support it"


def _no_flash(model: PreTrainedModel) -> str | None:
    if model.dtype not in (torch.float16, torch.bfloat16):
        return f"the base is {str(model.dtype).removeprefix('torch.')}"
    if not model._supports_flash_attn:
        return f"{type(model).__name__} does not support it"
    installed = is_flash_attn_2_available() or is_kernels_available()
    return None if installed else "neither flash_attn nor kernels is installed"
