"""Limits of a model: number of positions and of token ids."""

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import UserError
from .rotary import scalings

_STRETCHED = ("linear", "dynamic", "yarn")
"""Rotary scalings that extend ``max_position_embeddings`` by their factor."""


def positions(config: PreTrainedConfig) -> int | None:
    """Return how many tokens a model can read; None if unlimited, such as with ALiBi."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    if limit is None or getattr(config, "alibi", False):
        return None
    found = [limit]
    for scaling in scalings(config):
        if scaling["rope_type"] in _STRETCHED:
            before = scaling.get("original_max_position_embeddings") or limit
            found.append(int(before * scaling.get("factor", 1)))
    return max(found)


def check_tokens(name: str, model: PreTrainedModel, lengths: np.ndarray, largest: int) -> None:
    """Raise UserError if the model cannot read (N,) lengths, or the largest token id."""
    limit = positions(model.config)
    if limit is not None and lengths.max() > limit:
        raise UserError(
            f"{(lengths > limit).sum():,} of {len(lengths):,} rows are longer than the {limit} positions "
            f"of the model {name} (the longest has {lengths.max():,} tokens); set max_length to {limit} or "
            "less, which leaves them out."
        )
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if rows is not None and largest >= rows:
        raise UserError(
            f"The tokenizer has the token id {largest}, but the model {name} has {rows} embeddings; use the "
            "model's own tokenizer, or save the model with more (resize_token_embeddings)."
        )
