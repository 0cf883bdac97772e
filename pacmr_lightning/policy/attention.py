"""Attention implementations and their token layouts and masks."""

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_kernels_available

from ..batch import Segment
from ..errors import UserError
from .compiled import allow_recompilations
from .packed_attention import HALF, VARLEN
from .token_layout import Layout, Rows

AskedLayout = Literal["auto", "shared", "separate", "packed_shared"]
PreparedMask = Tensor | BlockMask

FLEX, FLASH = "flex_attention", "flash_attention_2"
PLAIN = ("sdpa", "eager")
"""Plain torch operations, twice differentiable on any device."""
LAYOUT_NAMES = {
    "shared": "a shared prompt",
    "packed_shared": "pairs with a shared prompt packed into one row",
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
    """Disable cuDNN's SDPA, which plans anew for each shape; globally, since backward recomputes forward.

    The environment variable PACMR_CUDNN_ATTENTION=1 leaves it on, to measure it.
    """
    torch.backends.cuda.enable_cudnn_sdp(os.environ.get("PACMR_CUDNN_ATTENTION") == "1")


def is_flash(attention: str) -> bool:
    """True for FlashAttention, which supports only causal masks."""
    return "flash" in attention  # also in names of Hub kernels


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
    if name == FLEX:
        allow_recompilations()
    model.set_attn_implementation(name)
    if attention_of(model) == before:
        raise ValueError(f"{type(model).__name__} keeps its {before} attention")


def check_attention(attention: str, layout: AskedLayout, dtype: torch.dtype, compiles: bool) -> None:
    """Check the attention options before anything is loaded."""
    known = ["auto", "eager", *(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if name != VARLEN)]
    if attention not in known and "/" not in attention:  # with a slash: a kernel on the Hub
        raise UserError(
            f"attn_implementation is {attention}, but it must be one of {', '.join(known)}, or the Hub id of "
            "a kernel."
        )
    if is_flash(attention) and dtype == torch.float32:
        raise UserError(
            f"{attention} computes in half precision, but the base is float32; set dtype to bfloat16, or "
            "attn_implementation to sdpa."
        )
    if is_flash(attention) and layout == "shared":
        raise UserError(
            f"{attention} cannot honour the mask of the layout shared; set layout to separate or auto, or "
            f"attn_implementation to {FLEX} or sdpa."
        )
    if layout == "packed_shared" and attention != "auto":
        raise UserError(
            f"attn_implementation is {attention}, but the layout packed_shared has an attention of its own; "
            "set attn_implementation to auto, or layout to auto."
        )
    if layout == "packed_shared" and compiles:
        raise UserError(
            "compile is true, but the layout packed_shared has another number of tokens in each forward "
            "pass and would compile for each; set compile to false, or layout to auto."
        )


def attention_plans(
    model: PreTrainedModel, asked: str, layout: AskedLayout, device: torch.device, compiles: bool = False
) -> tuple[list[AttentionPlan], list[str]]:
    """Return plans in a fixed order, so that all processes and resumed runs agree, and notes on others."""
    own, half = attention_of(model), model.dtype in HALF
    chosen: list[Layout] = [layout] if layout != "auto" else ["separate" if is_flash(own) else "shared"]
    on_gpu = asked == "auto" and device.type == "cuda"
    if on_gpu and layout == "auto" and half and not compiles and model._supports_flash_attn:
        chosen = ["packed_shared", *chosen]
    elif layout == "packed_shared":
        chosen.append("shared")
    layouts = dict.fromkeys([*chosen, "separate", "plain"])
    found = [AttentionPlan(VARLEN if name == "packed_shared" else own, name) for name in layouts]
    faster = []
    if on_gpu:
        installed = is_flash_attn_2_available() or is_kernels_available()
        if model._supports_flex_attn and layout in ("auto", "shared"):
            faster.append(FLEX)
        # Packed pairs use its kernel already.
        if (
            model._supports_flash_attn
            and installed
            and half
            and not {"shared", "packed_shared"} & layouts.keys()
        ):
            faster.append(FLASH)
    note = f"On this GPU attn_implementation {' or '.join(faster)} may be faster; try it on your model."
    return found, [note] if faster else []


def attention_inputs(rows: Rows, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the transformer's forward arguments other than tokens and positions."""
    if rows.real is not None:
        return {"attention_mask": rows.real.long()}
    if rows.packing is not None:
        assert config.get_text_config()._attn_implementation == VARLEN
        # transformers makes no mask where it is given one with 4 dimensions; this one is not used.
        return {"attention_mask": rows.input_ids.new_zeros(1, 1, 1, 1), "packing": rows.packing}
    return {"attention_mask": shared_mask(rows, config, dtype)}


def shared_mask(
    rows: Rows, config: PretrainedConfig, dtype: torch.dtype
) -> PreparedMask | dict[str, PreparedMask]:
    """Return the (R, 1, T, T) mask of shared rows; a dict for mixed layer types.

    Sliding windows count positions, not columns.
    """
    config = config.get_text_config()
    settings = config.to_dict()
    window, kinds = settings.get("sliding_window"), set(settings.get("layer_types") or ())
    segments, positions = rows.segment_ids, rows.position_ids
    assert segments is not None and positions is not None
    count, length = rows.input_ids.shape
    device = rows.input_ids.device
    prompt = int(Segment.PROMPT)

    def prepared(limit: int | None) -> PreparedMask:
        def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            """``mask_mod`` of FlexAttention."""
            own, other = segments[row, query], segments[row, key]
            # Padding attends to itself only, which keeps its softmax finite.
            seen = (query >= key) & ((own == other) | ((other == prompt) & (own > prompt)))
            if limit is not None:
                seen = seen & (positions[row, query] - limit < positions[row, key])
            return seen

        if config._attn_implementation == FLEX:
            return create_block_mask(visible, count, None, length, length, device)
        row, column = torch.arange(count, device=device), torch.arange(length, device=device)
        dense = visible(row[:, None, None, None], row, column[:, None], column)
        # Additive: SDPA would convert a boolean mask in every layer.
        scores = torch.zeros(dense.shape, dtype=dtype, device=device)
        return scores.masked_fill_(~dense, torch.finfo(dtype).min)

    limits = {"full_attention": None, "sliding_attention": window}
    if len(kinds) > 1 and kinds <= limits.keys():
        return {kind: prepared(limits[kind]) for kind in kinds}
    return prepared(None if kinds and kinds != {"sliding_attention"} else window)
