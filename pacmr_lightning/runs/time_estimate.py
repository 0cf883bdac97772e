"""Estimate of a run's floating point operations: matrix products counted on torch's meta device."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from ..policy.base_model import recompute_activations
from .memory_estimate import response_values


@dataclass(frozen=True)
class PairFlops:
    """Operations of one pass over one pair."""

    reference: int
    """Forward, without the adapter."""
    forward: int
    """Forward of the policy, without gradient."""
    gradient: int
    """Forward and backward of the policy, recomputation included."""
    recomputed: bool
    hooked: bool
    """True if the virtual step takes hooks (``virtual_step.shifted``), LoRA linears' second products."""

    @property
    def shifted_forward(self) -> int:
        """``forward`` of the virtual step."""
        return self.forward + self._shift

    @property
    def shifted_gradient(self) -> int:
        """``gradient`` of the virtual step, slightly overestimated in the first layer."""
        return self.gradient + (3 if self.recomputed else 2) * self._shift

    @property
    def _shift(self) -> int:
        return self.hooked * (self.forward - self.reference)


@dataclass(frozen=True)
class Plan:
    """Options that determine the passes of a run."""

    global_batch_size: int = 32
    every: int = 10
    meta_batch_size: int = 64
    coverage: float = 1.0
    """Share of the meta-batch above the threshold: only these pairs need a gradient."""
    cached: bool = True
    pairs: int | None = None
    """Training pairs of one epoch."""
    validation_pairs: int = 0
    validations: int = 4
    audit_sample: int = 0
    """Maximum number of pairs whose gradients an audit computes."""

    @property
    def updates(self) -> int:
        """Policy updates; an incomplete last batch is dropped."""
        return (self.pairs or 0) // self.global_batch_size


def pair_flops(
    policy: PeftModel, *, prompt_tokens: int, response_tokens: int, shared: bool, gradient_checkpointing: bool
) -> PairFlops:
    """Return operations of the passes over one pair; arguments as in ``memory_estimate.activation_bytes``."""
    model = cast(PreTrainedModel, policy.get_base_model())
    recompute_activations(model, gradient_checkpointing)
    policy.train()
    trained = [p for p in policy.parameters() if p.requires_grad]

    def count(gradient: bool) -> int:
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _in_place})
        with torch.device("meta"), counter, torch.set_grad_enabled(gradient):
            values = response_values(model, 1, prompt_tokens, response_tokens, shared, full_mask=True)
            if gradient:
                torch.autograd.grad(values.sum(), trained)
        return counter.get_total_flops()

    with policy.disable_adapter():
        reference = count(False)
    hooked = model.dtype != torch.float32
    return PairFlops(reference, count(False), count(True), gradient_checkpointing, hooked)


def _in_place(_: Any, a: torch.Size, b: torch.Size, **__: Any) -> int:
    """Operations of ``addmm_``, LoRA's in the base's dtype, which torch's counter leaves out."""
    return 2 * a[0] * a[1] * b[1]


def update_flops(flops: PairFlops, plan: Plan, estimator: str | None, kept: bool = False) -> float:
    """Return mean operations of a policy update over all devices, VNet's share included.

    ``estimator`` is None without a VNet; ``kept`` means that VNet's update keeps each pair's gradient.
    """
    live = 0 if plan.cached else flops.reference
    update = plan.global_batch_size * (flops.gradient + live)
    if estimator is None:
        return update
    originals, augmented = flops.shifted_forward + live, flops.shifted_gradient + live
    more = plan.meta_batch_size * (originals + plan.coverage * augmented)
    # Without kept gradients, virtual step and ghost dot product each run the pairs again.
    again = 0 if kept else plan.global_batch_size * flops.gradient
    more += again
    if estimator == "GhostDotProduct":
        more += again
    else:
        more += 2 * plan.global_batch_size * flops.shifted_forward
    return update + more / plan.every


def run_flops(flops: PairFlops, plan: Plan, update: float, vnet: bool = False, fits: int = 1) -> float:
    """Return operations of a run over all devices: updates, validations and the reference's cache.

    ``vnet`` adds augmented prompts to the cache; ``fits`` is 2 with a second pass, which reads the cache.
    """
    judged = plan.validations * plan.validation_pairs * (flops.forward + flops.reference)
    total = fits * (plan.updates * update + judged)
    if plan.cached:
        drawn = plan.meta_batch_size * math.ceil(plan.updates / plan.every) if vnet else 0
        asked = (plan.pairs or 0) + min(drawn, plan.pairs or 0)
        total += asked * flops.reference
    else:
        total -= (fits - 1) * plan.updates * plan.global_batch_size * flops.reference
    return total


def audit_flops(flops: PairFlops, plan: Plan) -> int:
    """Return operations of an audit by the trained policy, on one device."""
    pairs = plan.pairs or 0
    live = 0 if plan.cached else flops.reference
    return pairs * (flops.forward + live) + min(pairs, plan.audit_sample) * flops.gradient
