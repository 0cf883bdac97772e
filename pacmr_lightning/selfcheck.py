"""Finds out, on one real pair, which token layout a model computes correctly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn

from .batch import PairBatch, Segment
from .gradient import max_over_ranks

if TYPE_CHECKING:
    from .policy import PolicyModel

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Accepted difference of a response's mean token log-probability, in nats, by the base's dtype."""


def check_pair(batch: PairBatch, window: int | None) -> PairBatch:
    """The batch's longest pair, its prompt repeated until a response lies further from it than the window."""
    longest = int((batch.segment_ids != Segment.PAD).sum(1).argmax())
    pair = batch[longest : longest + 1]
    segments, tokens = pair.segment_ids[0], pair.input_ids[0]
    prompt, chosen, rejected = (tokens[segments == s] for s in list(Segment)[1:])
    if window is not None:
        prompt = prompt.repeat(max(1, -(-(window + 1) // len(prompt))))
    parts = [[part.tolist()] for part in (prompt, chosen, rejected)]
    checked = PairBatch.collate(pair.ids, *parts)
    return PairBatch(
        checked.ids, checked.input_ids.to(tokens.device), checked.segment_ids.to(tokens.device), pair.flipped
    )


@torch.no_grad()
def choose_layout(policy: PolicyModel, batch: PairBatch) -> Literal["shared", "separate", "plain"]:
    """The fastest layout whose log-probabilities equal those of the model's own forward on plain sequences.

    Warns when the layout that was asked for (or, with "auto", the shared one) cannot be used.
    """
    config = policy.model.config.get_text_config().to_dict()
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    # A window that no sequence can outgrow is no window.
    if window is not None and longest is not None and window >= longest:
        window = None
    pair = check_pair(batch, window)
    truth = policy.log_probs_in("plain", pair)
    tokens = min(int((pair.segment_ids == s).sum()) for s in (Segment.CHOSEN, Segment.REJECTED))
    candidates = ("separate",) if policy.layout == "separate" else ("shared", "separate")
    for layout in candidates:
        try:
            found = policy.log_probs_in(layout, pair)
            error = max(
                float((found.chosen - truth.chosen).abs().max()),
                float((found.rejected - truth.rejected).abs().max()),
            )
            reason = f"its log-probabilities differ by {error / tokens:.1e} nats a token"
            honoured = error / tokens <= TOLERANCE[policy.model.dtype]
        except (RuntimeError, ValueError, TypeError, AttributeError) as failure:
            reason, honoured = f"it fails with {type(failure).__name__}: {failure}", False
        if policy.is_sharded:  # a layout that only some ranks take would leave the others waiting
            honoured = not max_over_ranks(int(not honoured), batch.input_ids.device)
        if honoured:
            return layout
        instead = "one sequence a row" if layout == "shared" else "the model's own, whole logits"
        rank_zero_warn(
            f"{type(policy.model).__name__} with {policy.attn_implementation} attention cannot use the "
            f"{layout} layout ({reason}); falling back to {instead}."
        )
    return "plain"
