"""Log-probabilities of response tokens, in pieces since whole logits would be a step's largest tensors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class TokenValues(NamedTuple):
    """Values of K next-token distributions, in nats, in at least fp32."""

    log_probs: Tensor
    """(K,) of the targets."""
    entropies: Tensor | None
    """(K,) without gradient; None if not requested."""


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
        head: maps (k, H) to logits (k, V), which are overwritten.
        targets: (K,) token ids.
        pieces: number of pieces; with ZeRO-3 the same on all ranks.
        frozen: the head has no trained weights. Gradients by hidden state are then computed in forward and
            kept, (K, H); otherwise backward recomputes the logits.
        entropies: compute them too, with one more tensor of a piece's logits.
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
    """(k,) entropies log Z - sum s log s / Z of s / Z, from (k, V) s and (k,) 1 / Z."""
    return torch.special.entr(exponentials).sum(1) * factors - factors.log()


def _softmax_in_place(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Turn (k, V) logits into exp(logits - max); return (k,) log-probabilities and 1 / Z."""
    picked = logits.gather(1, targets[:, None])[:, 0]
    largest = logits.amax(1)
    total = logits.sub_(largest[:, None]).exp_().sum(1)
    return picked - largest - total.log(), 1 / total


def _with_slopes(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, entropies: bool
) -> tuple[TokenValues, Tensor]:
    """(k,) values and (k, H) gradients; a linear's backward needs no output, so logits are overwritten."""
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
    """Rows are independent: the gradient of a piece's sum holds each row's gradient."""

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
        if torch.is_grad_enabled():  # double backward: the slopes depend on the states
            value = _values(ctx.head, hidden, targets, entropies=False).log_probs
            (result,) = torch.autograd.grad(value, hidden, gradient, create_graph=True)
        else:
            result = (gradient[:, None] * slopes).to(hidden.dtype)
        return result, None, None, None, None


def upcast(x: Tensor) -> Tensor:
    """Cast to fp32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
