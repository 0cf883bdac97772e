"""Log-probabilities at response positions only, whose logits exist a piece at a time.

This is the chunked linear cross-entropy of a frozen head: with a vocabulary of 150,000 the logits of a whole
micro-batch would be the largest tensors of a step, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_log_probs(
    hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, pieces: int, frozen: bool
) -> Tensor:
    """Log-probabilities of K target tokens.

    Args:
        hidden: (K, H) hidden states that predict them.
        head: maps (k, H) to logits (k, V), which it keeps no use for.
        targets: (K,) token ids.
        pieces: into how many the rows are cut; the logits of one exist at a time. Where ZeRO-3 gathers the
            head for each, all ranks need the same number.
        frozen: nothing in ``head`` is trained. The gradient of each log-probability with respect to its
            hidden state is then computed along with it, and (K, H) kept; else backward repeats the logits.

    Returns:
        (K,) log-probabilities in nats, in at least fp32.
    """
    if hidden.requires_grad and frozen:
        return _FrozenHead.apply(hidden, targets, head, pieces)
    parts = []
    for h, t in zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
        if h.requires_grad:
            parts.append(checkpoint(_log_probs, head, h, t, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_log_probs(head, h, t))
    return torch.cat(parts)


def _log_probs(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    logits = upcast(head(hidden))
    if logits.requires_grad or logits is hidden:
        return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)
    return _softmax_in_place(logits, targets)[0]


def _softmax_in_place(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(k,) log-probabilities of the targets and (k,) factors that make probabilities of what is left.

    (k, V) logits become exp(logits - max): a second tensor of this size would cost as much time as the sums.
    """
    picked = logits.gather(1, targets[:, None])[:, 0]
    largest = logits.amax(1)
    total = logits.sub_(largest[:, None]).exp_().sum(1)
    return picked - largest - total.log(), 1 / total


def _with_slopes(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(k,) log-probabilities and their (k, H) gradients; a linear's backward needs no output, so all that is
    done with logits is done in their place."""
    with torch.enable_grad():
        hidden = hidden.detach().requires_grad_()
        output = head(hidden)
    logits = output.detach()
    scores = upcast(logits)
    values, factors = _softmax_in_place(scores, targets)
    # d log p_t / d logits = e_t - p
    scores.mul_(-factors[:, None])
    scores[torch.arange(len(targets), device=targets.device), targets] += 1
    (slopes,) = torch.autograd.grad(output, hidden, logits.copy_(scores))
    return values, slopes


class _FrozenHead(torch.autograd.Function):
    """Rows are independent, so the gradient of a piece's sum holds that of each of its log-probabilities."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], pieces: int
    ) -> Tensor:
        pieces_of = zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), strict=True)
        values, slopes = zip(*(_with_slopes(head, h, t) for h, t in pieces_of), strict=True)
        ctx.save_for_backward(hidden, targets, torch.cat(slopes))
        ctx.head = head
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates twice, and the slopes depend on the states
            value = _log_probs(ctx.head, hidden, targets)
            (result,) = torch.autograd.grad(value, hidden, gradient, create_graph=True)
        else:
            result = (gradient[:, None] * slopes).to(hidden.dtype)
        return result, None, None, None


def upcast(x: Tensor) -> Tensor:
    """To fp32, except that float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
