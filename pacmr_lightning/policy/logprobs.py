"""Log-probabilities at response positions only, whose logits exist a piece at a time.

This is the chunked linear cross-entropy of a frozen head: with a vocabulary of 150,000 the logits of a whole
micro-batch would be the largest tensors of a step, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class TokenValues(NamedTuple):
    """What the distributions of K next tokens say, in nats, in at least fp32."""

    log_probs: Tensor
    """(K,) of the target tokens."""
    entropies: Tensor | None
    """(K,) entropies, without gradient; None where nobody asked."""


def token_values(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    pieces: int,
    frozen: bool,
    entropies: bool = False,
) -> TokenValues:
    """Log-probabilities of K target tokens.

    Args:
        hidden: (K, H) hidden states that predict them.
        head: maps (k, H) to logits (k, V), which it keeps no use for.
        targets: (K,) token ids.
        pieces: into how many the rows are cut; the logits of one exist at a time. Where ZeRO-3 gathers the
            head for each, all ranks need the same number.
        frozen: nothing in ``head`` is trained. The gradient of each log-probability with respect to its
            hidden state is then computed along with it, and (K, H) kept; else backward repeats the logits.
        entropies: compute them too, for which one more tensor of a piece's logits exists.
    """
    if hidden.requires_grad and frozen:
        return TokenValues(*_FrozenHead.apply(hidden, targets, head, pieces, entropies))
    parts = []
    for h, t in zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
        given = (head, h, t, entropies)
        if h.requires_grad:
            parts.append(checkpoint(_values, *given, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_values(*given))
    return _joined(parts)


def _joined(parts: list[TokenValues]) -> TokenValues:
    entropies = [part.entropies for part in parts if part.entropies is not None]
    return TokenValues(
        torch.cat([part.log_probs for part in parts]), torch.cat(entropies) if entropies else None
    )


def _values(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, entropies: bool
) -> TokenValues:
    logits = upcast(head(hidden))
    if logits.requires_grad or logits is hidden:
        values = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)
        if not entropies:
            return TokenValues(values, None)
        logits = logits.detach().clone()
        return TokenValues(values, _entropies(logits, _softmax_in_place(logits, targets)[1]))
    values, factors = _softmax_in_place(logits, targets)
    return TokenValues(values, _entropies(logits, factors) if entropies else None)


def _entropies(exponentials: Tensor, factors: Tensor) -> Tensor:
    """(k,) entropies of the probabilities s / Z, from (k, V) s and (k,) 1 / Z: log Z - sum s log s / Z."""
    return torch.special.entr(exponentials).sum(1) * factors - factors.log()


def _softmax_in_place(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(k,) log-probabilities of the targets and (k,) factors that make probabilities of what is left.

    (k, V) logits become exp(logits - max): a second tensor of this size would cost as much time as the sums.
    """
    picked = logits.gather(1, targets[:, None])[:, 0]
    largest = logits.amax(1)
    total = logits.sub_(largest[:, None]).exp_().sum(1)
    return picked - largest - total.log(), 1 / total


def _with_slopes(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, entropies: bool
) -> tuple[TokenValues, Tensor]:
    """(k,) values, and (k, H) gradients of the log-probabilities; a linear's backward needs no output, so all
    that is done with logits is done in their place."""
    with torch.enable_grad():
        hidden = hidden.detach().requires_grad_()
        output = head(hidden)
    logits = output.detach()
    scores = upcast(logits)
    values, factors = _softmax_in_place(scores, targets)
    found = TokenValues(values, _entropies(scores, factors) if entropies else None)
    # d log p_t / d logits = e_t - p
    scores.mul_(-factors[:, None])
    scores[torch.arange(len(targets), device=targets.device), targets] += 1
    (slopes,) = torch.autograd.grad(output, hidden, logits.copy_(scores))
    return found, slopes


class _FrozenHead(torch.autograd.Function):
    """Rows are independent, so the gradient of a piece's sum holds that of each of its log-probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: Callable[[Tensor], Tensor],
        pieces: int,
        entropies: bool,
    ) -> tuple[Tensor, Tensor | None]:
        pieces_of = zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), strict=True)
        parts, slopes = zip(*(_with_slopes(head, h, t, entropies) for h, t in pieces_of), strict=True)
        ctx.save_for_backward(hidden, targets, torch.cat(slopes))
        ctx.head = head
        found = _joined(list(parts))
        if found.entropies is not None:
            ctx.mark_non_differentiable(found.entropies)
        return found.log_probs, found.entropies

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, targets, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates twice, and the slopes depend on the states
            value = _values(ctx.head, hidden, targets, entropies=False).log_probs
            (result,) = torch.autograd.grad(value, hidden, gradient, create_graph=True)
        else:
            result = (gradient[:, None] * slopes).to(hidden.dtype)
        return result, None, None, None, None


def upcast(x: Tensor) -> Tensor:
    """To fp32, except that float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
