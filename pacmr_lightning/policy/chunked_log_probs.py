"""Log-probabilities of response tokens, in pieces since whole logits would be a step's largest tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


def token_log_probs(
    hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, pieces: int, frozen: bool
) -> Tensor:
    """Return the (K,) log-probabilities of K target tokens, in nats, in at least fp32.

    Args:
        hidden: (K, H) hidden states that predict them.
        head: maps (k, H) to logits (k, V), which are overwritten.
        targets: (K,) token ids.
        pieces: number of pieces; with ZeRO-3 the same on all ranks.
        frozen: the head has no trained weights. Gradients by hidden state are then computed in forward and
            kept, (K, H); otherwise backward recomputes the logits.
    """
    if hidden.requires_grad and frozen:
        return _FrozenHead.apply(hidden, targets, head, pieces)
    parts = []
    for h, t in zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
        if h.requires_grad:
            parts.append(checkpoint(_values, head, h, t, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_values(head, h, t))
    return torch.cat(parts)


def _values(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    logits = upcast(head(hidden))
    if logits.requires_grad or logits is hidden:
        return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)
    return _softmax_in_place(logits, targets)[0]


def _softmax_in_place(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Turn (k, V) logits into exp(logits - max); return (k,) log-probabilities and 1 / Z."""
    picked = logits.gather(1, targets[:, None])[:, 0]
    largest = logits.amax(1)
    total = logits.sub_(largest[:, None]).exp_().sum(1)
    return picked - largest - total.log(), 1 / total


def _with_slopes(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(k,) values and (k, H) gradients; a linear's backward needs no output, so logits are overwritten."""
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
    """Rows are independent: the gradient of a piece's sum holds each row's gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], pieces: int
    ) -> Tensor:
        pieces_of = zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), strict=True)
        values, slopes = zip(*(_with_slopes(head, h, t) for h, t in pieces_of), strict=True)
        ctx.save_for_backward(torch.cat(slopes))
        ctx.dtype = hidden.dtype
        return torch.cat(values)

    @staticmethod
    @once_differentiable  # the slopes depend on the states
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (gradient[:, None] * slopes).to(ctx.dtype), None, None, None


def upcast(x: Tensor) -> Tensor:
    """Cast to fp32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
