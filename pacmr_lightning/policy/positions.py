"""Positions and token ids that a model can read, and rotary frequencies that depend on a sequence's length.

transformers chooses these by the largest position of the whole batch (longrope), or of all batches since the
last short one (dynamic NTK), so that a sequence's values depend on its neighbours. Here each row has its own.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import UserError

_BY_LENGTH = ("dynamic", "longrope")
"""Rotary scalings whose frequencies depend on the length."""
_STRETCHED = ("linear", "dynamic", "yarn")
"""Rotary scalings that extend ``max_position_embeddings`` by their factor."""


def scalings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return a model's rotary scalings: one, or one per layer type."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [entry for entry in (rope, *rope.values()) if isinstance(entry, dict) and "rope_type" in entry]


def positions(config: PreTrainedConfig) -> int | None:
    """Return how many tokens a model can read; None if unlimited, such as with ALiBi."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    if limit is None or getattr(config, "alibi", False):
        return None
    limits = [limit]
    for scaling in scalings(config):
        if scaling["rope_type"] in _STRETCHED:
            before = scaling.get("original_max_position_embeddings") or limit
            limits.append(int(before * scaling.get("factor", 1)))
    return max(limits)


def check_tokens(name: str, model: PreTrainedModel, lengths: np.ndarray, largest: int) -> None:
    """Raise UserError if the model cannot read (N,) lengths, or the largest token id."""
    limit = positions(model.config)
    if limit is not None and lengths.max() > limit:
        raise UserError(
            f"{(lengths > limit).sum():,} of {len(lengths):,} rows are longer than the {limit} positions "
            f"of the model {name} (the longest has {lengths.max():,} tokens); set max_length to {limit} or "
            "less, which leaves them out."
        )
    check_largest(name, model, largest)


def check_largest(name: str, model: PreTrainedModel, largest: int) -> None:
    """Raise UserError if the model has no embedding of the largest token id."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if rows is not None and largest >= rows:
        raise UserError(
            f"The tokenizer has the token id {largest}, but the model {name} has {rows} embeddings; use the "
            "model's own tokenizer (an adapter's: its base's), or save that model with more "
            "(resize_token_embeddings)."
        )


def length_limit(config: PreTrainedConfig) -> int | None:
    """Return up to how many tokens frequencies do not depend on the length; None if they never do."""
    config = config.get_text_config()
    largest = getattr(config, "max_position_embeddings", None)
    limits = [
        min(scaling.get("original_max_position_embeddings") or largest, largest)
        for scaling in scalings(config)
        if scaling["rope_type"] in _BY_LENGTH and largest is not None
    ]
    return min(limits, default=None)


def choose_by_row(model: nn.Module, config: PreTrainedConfig) -> int | None:
    """Make rotary embeddings choose frequencies for each row of position ids; return ``length_limit``."""
    limit = length_limit(config)
    for module in model.modules():
        takes = "Rotary" in type(module).__name__ and inspect.signature(module.forward).parameters
        if limit is not None and takes and "position_ids" in takes:
            module.forward = _by_row(module.forward)
    return limit


def _by_row(forward: Callable[..., Any]) -> Callable[..., Any]:
    def each(x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        outputs = []
        for row in position_ids.split(1):
            forward(x, torch.zeros_like(row[:, :1]), *args, **options)  # dynamic: forget longer rows
            outputs.append(forward(x, row, *args, **options))
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs)
        return tuple(torch.cat(part) for part in zip(*outputs, strict=True))

    return each
