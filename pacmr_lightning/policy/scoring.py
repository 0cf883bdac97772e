"""One forward pass of a policy over rows: log-probabilities of responses, and what pairs are judged by."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..batch import LogProbs
from ..ranks import max_over_ranks
from .logprobs import token_log_probs, upcast
from .masks import attention_inputs
from .rows import Rows

if TYPE_CHECKING:
    from .model import PolicyModel


def log_probs(policy: PolicyModel, rows: Rows, whole_logits: bool) -> LogProbs:
    """Summed response log-probabilities of N pairs, as (N,) values in nats.

    Args:
        policy: with its adapter on or off.
        rows: of the pairs.
        whole_logits: take the model's own logits, which it may transform, and not its head's.
    """
    states, head = _predictions(policy, rows, whole_logits)
    frozen = not any(p.requires_grad for p in policy.model.get_output_embeddings().parameters())
    frozen = frozen and not whole_logits
    return rows.log_probs(token_log_probs(states, head, rows.targets, _pieces(policy, rows), frozen))


def judged(
    policy: PolicyModel, rows: Rows, whole_logits: bool, reference: LogProbs | None
) -> tuple[LogProbs, LogProbs, Tensor]:
    """Log-probabilities under policy and reference, and their KL, from one forward pass of each.

    Args:
        policy: with its adapter on.
        rows: of N pairs.
        whole_logits: see ``log_probs``.
        reference: its log-probabilities, if they are known.

    Returns:
        Summed response log-probabilities under the policy and under the reference in nats, and the (N,)
        KL(pi || pi_ref) of the next token in nats, averaged over the pair's response positions.
    """
    states, head = _predictions(policy, rows, whole_logits)
    with policy.reference():
        states_reference, _ = _predictions(policy, rows, whole_logits)
    parts = []
    pieces = _pieces(policy, rows)
    for h, h_reference, target in zip(
        *(x.tensor_split(pieces) for x in (states, states_reference, rows.targets)), strict=True
    ):
        log_p = upcast(head(h)).log_softmax(1)
        with policy.reference():
            log_q = upcast(head(h_reference)).log_softmax(1)
        chosen = (log.gather(1, target[:, None])[:, 0] for log in (log_p, log_q))
        parts.append(torch.stack([*chosen, (log_p.exp() * (log_p - log_q)).sum(1)]))
    tokens_p, tokens_q, tokens_kl = torch.cat(parts, dim=1)
    pair = rows.owner % rows.pairs
    sums = tokens_kl.new_zeros(rows.pairs).index_add(0, pair, tokens_kl)
    kl = sums / torch.bincount(pair, minlength=rows.pairs)
    return rows.log_probs(tokens_p), reference or rows.log_probs(tokens_q), kl


def _pieces(policy: PolicyModel, rows: Rows) -> int:
    """How often the head is asked; as often on every rank where it is gathered each time."""
    pieces = -(-len(rows.targets) // policy.logit_chunk)
    return max_over_ranks(pieces, rows.targets.device) if policy.is_sharded else pieces


def _predictions(
    policy: PolicyModel, rows: Rows, whole_logits: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(K, H) states that predict the response tokens, and what makes logits of them."""
    model = policy.model
    inputs = attention_inputs(rows, model.config, model.dtype)
    inputs |= {"input_ids": rows.input_ids, "position_ids": rows.position_ids, "use_cache": False}
    if whole_logits:
        return model(**inputs).logits[rows.source], nn.Identity()
    return model.base_model(**inputs).last_hidden_state[rows.source], model.get_output_embeddings()
