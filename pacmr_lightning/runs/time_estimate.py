"""Floating point operations of a run: counted on the model's own code, without its weights.

A pass over one pair is run on torch's meta device, where tensors have shapes and no contents, and torch's own
counter adds up its matrix products: two operations a multiplication. What a run is made of is then a sum of
such passes. Attention counts as plain products over all of a row, masked parts included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

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
    """Forward, the adapter off."""
    forward: int
    """Forward of the policy, without gradient."""
    gradient: int
    """Forward and backward of the policy, with what is computed again."""
    recomputed: bool
    """Whether backward computes activations again."""

    @property
    def shifted_forward(self) -> int:
        """``forward`` at moved parameters: each LoRA linear has a second product."""
        return self.forward + self._adapter

    @property
    def shifted_gradient(self) -> int:
        """``gradient`` at moved parameters; a little too much, since the first layer's input needs none."""
        return self.gradient + (3 if self.recomputed else 2) * self._adapter

    @property
    def _adapter(self) -> int:
        return self.forward - self.reference


@dataclass(frozen=True)
class Plan:
    """What a run does with its pairs, as its options say."""

    global_batch_size: int = 32
    every: int = 10
    """Updates of the policy to one of VNet."""
    meta_batch_size: int = 64
    coverage: float = 1.0
    """Share of the meta pairs that pass the threshold: only these are run with gradient."""
    cached: bool = True
    """Whether the reference is asked once, before training."""
    pairs: int | None = None
    """Training pairs, of one epoch."""
    validation_pairs: int = 0
    validations: int = 4
    audit_sample: int = 0
    """Pairs whose gradients an audit takes, at most."""

    @property
    def updates(self) -> int:
        """Of the policy; an incomplete last batch is dropped."""
        return (self.pairs or 0) // self.global_batch_size


def pair_flops(
    policy: PeftModel, *, prompt_tokens: int, response_tokens: int, shared: bool, gradient_checkpointing: bool
) -> PairFlops:
    """Counts the passes over one pair; more pairs in a micro-batch take as many times that.

    Args:
        policy: of ``memory_estimate.build``, on the meta device.
        prompt_tokens: of the prompt.
        response_tokens: of each response.
        shared: one row, prompt + chosen + rejected; else two rows, each with the prompt.
        gradient_checkpointing: activations inside of a layer are computed again in backward.
    """
    model = cast(PreTrainedModel, policy.get_base_model())
    recompute_activations(model, gradient_checkpointing)
    policy.train()
    trained = [p for p in policy.parameters() if p.requires_grad]

    def count(gradient: bool) -> int:
        counter = FlopCounterMode(display=False)
        with torch.device("meta"), counter, torch.set_grad_enabled(gradient):
            values = response_values(model, 1, prompt_tokens, response_tokens, shared, full_mask=True)
            if gradient:
                torch.autograd.grad(values.sum(), trained)
        return counter.get_total_flops()

    with policy.disable_adapter():
        reference = count(False)
    return PairFlops(reference, count(False), count(True), gradient_checkpointing)


def update_flops(flops: PairFlops, plan: Plan, estimator: str | None, kept: bool = False) -> float:
    """Operations of an update of the policy, over all devices; on average, where VNet learns at some.

    Args:
        flops: of one pair.
        plan: of the run.
        estimator: of PACMR-DPO's coefficients; None where no VNet is learned, as in DPO.
        kept: whether an update of VNet keeps each pair's gradient, see ``meta_gradient.StepPairs``.
    """
    live = 0 if plan.cached else flops.reference
    update = plan.global_batch_size * (flops.gradient + live)
    if estimator is None:
        return update
    originals, reworded = flops.shifted_forward + live, flops.shifted_gradient + live
    more = plan.meta_batch_size * (originals + plan.coverage * reworded)
    # The virtual step and the ghost dot-product each run the pairs again where gradients are not kept.
    again = 0 if kept else plan.global_batch_size * flops.gradient
    more += again
    if estimator == "GhostDotProduct":
        more += again
    else:
        more += 2 * plan.global_batch_size * flops.shifted_forward
    return update + more / plan.every


def run_flops(flops: PairFlops, plan: Plan, update: float, vnet: bool = False, fits: int = 1) -> float:
    """Operations of a run, which its devices share: updates, validations, the reference's cache.

    Args:
        flops: of one pair.
        plan: of the run, with ``pairs``.
        update: operations of an update.
        vnet: whether meta pairs are reworded; the cache is asked about as many as the run draws.
        fits: 2 with a second pass, which finds the reference's log-probabilities on disk.
    """
    judged = plan.validations * plan.validation_pairs * (flops.forward + flops.reference)
    total = fits * (plan.updates * update + judged)
    if plan.cached:
        drawn = plan.meta_batch_size * math.ceil(plan.updates / plan.every) if vnet else 0
        asked = (plan.pairs or 0) + plan.validation_pairs + min(drawn, plan.pairs or 0)
        total += asked * flops.reference
    else:
        total -= (fits - 1) * plan.updates * plan.global_batch_size * flops.reference
    return total


def audit_flops(flops: PairFlops, plan: Plan) -> int:
    """Operations of an audit by the run's own policy, which one device does: a look at every pair."""
    pairs = plan.pairs or 0
    live = 0 if plan.cached else flops.reference
    return pairs * (flops.forward + live) + min(pairs, plan.audit_sample) * flops.gradient
