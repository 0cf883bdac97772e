"""Which attention a policy can run on, in which token layouts, and what is refused at once."""

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
LAYOUT_NAMES = {
    "shared": "a shared prompt",
    "packed": "sequences packed into one row",
    "separate": "one sequence a row",
    "plain": "the model's own, whole logits",
}


@dataclass(frozen=True)
class AttentionPlan:
    """How log-probabilities are computed."""

    attention: str
    """As in transformers."""
    layout: Layout

    def __str__(self) -> str:
        return f"{LAYOUT_NAMES[self.layout]} with {self.attention} attention"


def exclude_cudnn() -> None:
    """Keep SDPA from cuDNN's kernels in this process, which plan anew for each number of rows and length.

    For the whole process, since a layer whose activations are recomputed runs again in backward.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


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


def attention_plans(
    model: PreTrainedModel, asked: str, layout: AskedLayout, device: torch.device
) -> tuple[list[AttentionPlan], list[str]]:
    """What is tried, in this order, and sentences about what could be asked for instead.

    Unasked that is what transformers takes, on every device: kernels for GPUs that may be faster have to be
    asked for. The order is fixed and not timed on the spot, so that a run that goes on, or another process,
    computes the same.

    Args:
        model: loaded with what was asked for, or ("auto") with transformers' own choice.
        asked: ``attn_implementation``.
        layout: which one is asked for.
        device: of the model.
    """
    own = model.config._attn_implementation
    own_layouts = ["packed" if is_flash(own) else "shared"] if layout == "auto" else [layout]
    found = [AttentionPlan(own, laid_out) for laid_out in dict.fromkeys([*own_layouts, "separate", "plain"])]
    if asked != "auto" or device.type != "cuda":
        return found, []
    faster = [name for name in (FLEX, FLASH) if _can_have(model, name, layout)]
    if not faster:
        return found, []
    return found, [
        f"On this GPU attn_implementation {' or '.join(faster)} may be faster; try it on your model."
    ]


def _can_have(model: PreTrainedModel, attention: str, layout: AskedLayout) -> bool:
    if attention == FLEX:
        return model._supports_flex_attn and layout in ("auto", "shared")
    installed = is_flash_attn_2_available() or is_kernels_available()
    half = model.dtype in (torch.float16, torch.bfloat16)
    return model._supports_flash_attn and installed and half and layout != "shared"
