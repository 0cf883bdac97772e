"""Attention implementations and their token layouts."""

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UserError
from .packed_attention import HALF, VARLEN
from .token_layout import Layout

AskedLayout = Literal["auto", "shared", "separate"]

PLAIN = ("sdpa", "eager")
"""Plain torch operations, twice differentiable on any device."""
LAYOUT_NAMES = {
    "shared": "a shared prompt",
    "packed": "pairs with a shared prompt packed into one row",
    "separate": "one sequence a row",
    "plain": "the model's own, whole logits",
}


@dataclass(frozen=True)
class AttentionPlan:
    """Attention implementation and token layout for log-probabilities."""

    attention: str
    layout: Layout

    def __str__(self) -> str:
        return f"{LAYOUT_NAMES[self.layout]} with {self.attention} attention"


def exclude_cudnn() -> None:
    """Disable cuDNN's SDPA, which plans anew for each shape; globally, since backward recomputes forward."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def attention_of(model: PreTrainedModel) -> str:
    """Return the model's current attention implementation."""
    return model.config._attn_implementation


def plain_attention(model: PreTrainedModel) -> str:
    """Return "sdpa", or "eager" where the model does not support it."""
    return "sdpa" if model._supports_sdpa else "eager"


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Switch a model's attention; raises ValueError or ImportError if that is impossible."""
    before = attention_of(model)
    if name == before:
        return
    model.set_attn_implementation(name)
    if attention_of(model) == before:
        raise ValueError(f"{type(model).__name__} keeps its {before} attention")


def check_attention(attention: str, layout: AskedLayout, dtype: torch.dtype) -> None:
    """Check the attention options before anything is loaded."""
    others = [name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if name not in (VARLEN, "flex_attention")]
    known = ["auto", "eager", *others]
    if attention not in known and "/" not in attention:  # with a slash: a kernel on the Hub
        raise UserError(
            f"attn_implementation is {attention}, but it must be one of {', '.join(known)}, or the Hub id of "
            "a kernel."
        )
    if "flash" in attention and dtype == torch.float32:  # also in names of Hub kernels
        raise UserError(
            f"{attention} computes in half precision, but the base is float32; set dtype to bfloat16, or "
            "attn_implementation to sdpa."
        )
    if layout == "shared" and attention not in ("auto", *PLAIN):
        raise UserError(
            f"{attention} does not take the mask of the layout shared; set layout to separate or auto, or "
            "attn_implementation to sdpa."
        )


def packs(model: PreTrainedModel, device: torch.device) -> bool:
    """True where shared rows are packed."""
    return device.type == "cuda" and model.dtype in HALF and model._supports_flash_attn


def attention_plans(
    model: PreTrainedModel, asked: str, layout: AskedLayout, device: torch.device
) -> list[AttentionPlan]:
    """Return plans in a fixed order, so that all processes and resumed runs agree."""
    own = attention_of(model)
    own = plain_attention(model) if own == VARLEN else own  # the layout of shorter pairs
    plans = [AttentionPlan(own, "separate"), AttentionPlan(own, "plain")]
    if layout == "separate" or own not in PLAIN:
        return plans
    plans.insert(0, AttentionPlan(own, "shared"))
    if asked == "auto" and packs(model, device):
        plans.insert(0, AttentionPlan(VARLEN, "packed"))
    return plans
