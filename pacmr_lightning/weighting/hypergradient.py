"""Estimators of c_i = d . grad l_i(omega), what VNet's gradient needs of each training pair.

(Paper, section 5.4 and appendix A.) d is d_meta, l_i the unweighted loss of pair i. Only c_i costs passes of
the policy; VNet's own gradient is then -1/N sum_i c_i dV_i/dTheta.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..batch import PairBatch
from ..errors import UserError
from ..gradient import Direction, norm
from ..objectives import Objective
from ..policy import PolicyModel
from .inner import pair_losses
from .shift import shifted


class Estimator(ABC):
    """Estimates c_i for N pairs.

    Args:
        clip: coefficients are clipped to [-clip, clip] (the paper's constant is 10); None for no clipping.
    """

    def __init__(self, clip: float | None = 10.0):
        if clip is not None and not clip > 0:
            raise UserError(f"clip is {clip}, but it must be above 0 (the paper uses 10) or null for none.")
        self.clip = clip

    @abstractmethod
    def coefficients(
        self,
        policy: PolicyModel,
        objective: Objective,
        batch: PairBatch,
        direction: Direction,
        micro_batch_size: int | None,
    ) -> Tensor:
        """(N,) unclipped coefficients of pairs that bring their reference log-probabilities."""

    def clipped(self, coefficients: Tensor) -> Tensor:
        """The coefficients within the clipping bounds."""
        return coefficients if self.clip is None else coefficients.clamp(-self.clip, self.clip)


class CentralDifference(Estimator):
    """[l_i(omega + eps d) - l_i(omega - eps d)] / (2 eps): the paper's estimator, two forward passes.

    Args:
        epsilon: the paper's eps, 3e-3.
        relative: the step is epsilon / norm(d), so that its length does not depend on how long d is. Under a
            bf16 base a raw step along a short d drowns in rounding; 0.03 to 0.1 relative survives it.
        clip: see ``Estimator``.
    """

    def __init__(self, epsilon: float = 3e-3, relative: bool = False, clip: float | None = 10.0):
        super().__init__(clip)
        if not epsilon > 0:
            raise UserError(f"epsilon is {epsilon}, but it must be above 0 (the paper uses 0.003).")
        self.epsilon = epsilon
        self.relative = relative

    @torch.no_grad()
    def coefficients(
        self,
        policy: PolicyModel,
        objective: Objective,
        batch: PairBatch,
        direction: Direction,
        micro_batch_size: int | None,
    ) -> Tensor:
        """(N,) unclipped coefficients.

        Raises:
            UserError: the objective's gradient is not that of its values.
        """
        if objective.holds_factors:
            raise UserError(
                f"CentralDifference takes differences of the loss, but {type(objective).__name__} holds "
                "factors of it fixed; use GhostDotProduct."
            )
        step = self.epsilon / float(norm(direction)) if self.relative else self.epsilon
        sides = []
        for sign in (1, -1):
            with shifted(policy, direction, sign * step):
                parts = [
                    pair_losses(policy, objective, part) for part in batch.micro_batches(micro_batch_size)
                ]
            sides.append(torch.cat(parts))
        return (sides[0] - sides[1]) / (2 * step)


class ExactCoefficients(Estimator):
    """c_i by differentiating through the gradient with its graph retained (paper, appendix A.3).

    The derivative of d . grad (sum_i w_i l_i) with respect to w_i is c_i. It takes the memory that the other
    estimators avoid, and attention that can be differentiated twice; it is there for tests and benchmarks.
    """

    def coefficients(
        self,
        policy: PolicyModel,
        objective: Objective,
        batch: PairBatch,
        direction: Direction,
        micro_batch_size: int | None,
    ) -> Tensor:
        """(N,) unclipped coefficients."""
        parameters = list(policy.adapter().values())
        parts = []
        for part in batch.micro_batches(micro_batch_size):
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                losses = pair_losses(policy, objective, part)
                w = torch.ones_like(losses, requires_grad=True)
                gradients = torch.autograd.grad((w * losses).sum(), parameters, create_graph=True)
                pairs = zip(gradients, direction.values(), strict=True)
                along = sum((gradient * d).sum() for gradient, d in pairs)
                parts.append(torch.autograd.grad(along, w)[0])
        return torch.cat(parts)


class GhostDotProduct(Estimator):
    """c_i exactly, for all pairs at once, in one ordinary backward pass.

    A linear's weight gradient for one pair is the sum over tokens of g_t x_t^T, x the layer's input and g the
    gradient at its output, so its product with D is the sum of g_t . (D x_t): hooks on the LoRA linears add
    that up without any per-pair gradient. (The technique of ghost clipping, arXiv 2110.05679, and of in-run
    data Shapley, arXiv 2406.11011.)
    """

    def coefficients(
        self,
        policy: PolicyModel,
        objective: Objective,
        batch: PairBatch,
        direction: Direction,
        micro_batch_size: int | None,
    ) -> Tensor:
        """(N,) unclipped coefficients."""
        parameters = list(policy.adapter().values())
        parts = []
        for part in batch.micro_batches(micro_batch_size):
            with torch.enable_grad(), ghost_hooks(policy, direction) as dots:
                torch.autograd.grad(pair_losses(policy, objective, part).sum(), parameters)
            if any(len(dot) % len(part) for dot in dots) or len({len(dot) for dot in dots}) != 1:
                raise UserError(
                    "GhostDotProduct needs LoRA layers that see whole rows, but this model mixes the tokens "
                    "of several rows (mixture of experts?); use CentralDifference."
                )
            # One row a pair, or (one sequence a row) chosen rows before rejected ones.
            parts.append(torch.stack(dots).sum(0).view(-1, len(part)).sum(0))
        return torch.cat(parts)


@contextmanager
def ghost_hooks(policy: PolicyModel, direction: Direction) -> Iterator[list[Tensor]]:
    """Inside, backward fills the list with (R,) tensors: each LoRA linear's share of the dot product by row.

    Keeps rank-sized tensors only: D_A x for A, and the input of B for B. Backward must run inside. A forward
    repeated by activation checkpointing registers hooks on outputs that no backward reaches, or (reentrant)
    on the only outputs that have a gradient, so each layer counts once either way.
    """
    dots: list[Tensor] = []

    def watch(weight: Tensor, is_b: bool, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if not output.requires_grad:
            return
        x = inputs[0].detach()
        kept = x if is_b else x.to(weight.dtype) @ weight.T

        def dot(gradient: Tensor) -> None:
            # For B, g . (D h) = (g D) . h needs the (small) input only.
            left = gradient.to(weight.dtype) @ weight if is_b else gradient
            dots.append((left * kept).flatten(1).sum(1, dtype=torch.promote_types(left.dtype, kept.dtype)))

        output.register_hook(dot)

    handles = []
    try:
        for name, linear in policy.lora_linears().items():
            hook = partial(watch, direction[name], ".lora_B." in name)
            handles.append(linear.register_forward_hook(hook))
        yield dots
    finally:
        for handle in handles:
            handle.remove()
