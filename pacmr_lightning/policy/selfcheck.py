"""Self-check of attention and token layout on the longest and shortest pairs."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from ..batch import LogProbs, PairBatch, Segment
from ..errors import UserError, first_line, is_out_of_memory
from ..strategies.ranks import max_over_ranks
from .attention import (
    PLAIN,
    AskedLayout,
    AttentionPlan,
    attention_of,
    attention_plans,
    plain_attention,
    use_attention,
)
from .chunked_log_probs import upcast
from .lora import linear_names
from .lora_layer import share_inputs
from .positions import length_limit
from .token_layout import Layout, Rows, alone_rows, rows_of, wide

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Accepted difference of a response's mean token log-probability, in nats, by dtype."""
GRADIENT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Accepted relative error of the gradient at the embeddings, by dtype."""
ROUNDING_FACTOR = 3
"""Accepted multiple of what rounding alone changes in the model's own forward, beyond these tolerances."""
DRAWS = 3
"""Runs of the model's own forward that measure this."""
JUDGE_BYTES = 2**32
"""Maximum bytes of the trusted attention weights."""

Computed = tuple[Tensor, Tensor]
"""(2, 1 + K) log-probabilities of chosen and rejected, and (V', H) their gradient by token id.

They are those of the first of K pairs, of which the gradient is, and of all of them in one batch.
"""
Errors = tuple[float, float]
"""Largest difference of a response's mean token, in nats, and relative error of the gradient."""


# Lightning validates in inference mode, which has no gradient.
@torch.inference_mode(False)
@torch.no_grad()
def choose_plan(
    model: PreTrainedModel,
    asked: str,
    layout: AskedLayout,
    batch: PairBatch,
    score: Callable[[Rows], LogProbs],
    compiled: bool,
) -> AttentionPlan:
    """Return and activate the first plan that matches the model's own forward on the batch's extreme pairs.

    The own forward reads one sequence at a time. A plan must give the longest pair's values and gradient, and
    all values in one batch. They are compared with SDPA's plain kernel, since a kernel may be wrong in
    backward only. Large activations may amplify rounding beyond any fixed tolerance. The limit is then
    ``ROUNDING_FACTOR`` times what rounding changes in the own forward. All processes use the same plan.
    """
    own, name = attention_of(model), type(model).__name__
    trusted = own if own in PLAIN else plain_attention(model)
    device = next((p for p in model.parameters() if p.requires_grad), next(model.parameters())).device
    pairs = move_data_to_device(batch.extremes(), device)
    check = _PairCheck(model, pairs, score, trusted, compiled)
    candidates = attention_plans(model, asked, layout, device)
    was_training = model.training
    model.train()  # as in training, where gradient checkpoints apply; there is no dropout
    try:
        with check.by_trusted_kernels():
            truth = check.trusted()
        for plan, following in zip(candidates, [*candidates[1:], None], strict=True):
            fault = check.fault(plan, truth)
            if max_over_ranks(int(fault is not None), device):
                fault = fault or "it fails in another process"
            if fault is None:
                if asked == "auto":
                    rank_zero_info(f"Log-probabilities are computed from {plan}.")
                use_attention(model, plan.attention)
                return plan
            if following is not None:
                rank_zero_warn(f"{name} does not use {plan} ({fault}); falling back to {following}.")
    finally:
        model.train(was_training)
    others = " or ".join(each for each in ("sdpa", "eager") if each != plan.attention)
    raise UserError(
        f"No layout gives {name} with {plan.attention} attention the values of each sequence alone "
        f"({fault}); set attn_implementation to {others}, or name another model."
    )


@dataclass
class _PairCheck:
    model: PreTrainedModel
    pairs: PairBatch
    """K pairs, a longest first."""
    score: Callable[[Rows], LogProbs]
    attention: str
    """Trusted attention."""
    compiled: bool

    @contextmanager
    def by_trusted_kernels(self) -> Iterator[None]:
        use_attention(self.model, self.attention)
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(self.trusted_kernels()))
            if self.compiled:  # or this kernel would be compiled in
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def trusted(self) -> Computed:
        """Return the values of the model's own forward; refuse adapters that it does not call.

        Layers that it calls one after the other with the same tensor are computed together afterwards.
        """
        model, name = self.model, type(self.model).__name__
        layers = {layer: key for key, layer in model.named_modules() if isinstance(layer, LoraLayer)}
        calls: list[tuple[Any, list[LoraLayer]]] = []  # inputs in turn, each with its layers

        def record(layer: Any, inputs: tuple[Any, ...]) -> None:
            if not calls or not inputs or calls[-1][0]() is not inputs[0]:
                calls.append((weakref.ref(inputs[0]) if inputs else lambda: None, []))
            calls[-1][1].append(layer)

        handles = [layer.register_forward_pre_hook(record) for layer in layers]  # type: ignore[attr-defined]
        try:
            truth = self._computed(None)
            ahead = self._looks_ahead()
        except Exception as failure:  # any error of a model's code
            if is_out_of_memory(failure) or isinstance(failure, torch.distributed.DistError):
                raise
            raise UserError(
                f"The forward pass of {name} fails ({type(failure).__name__}: {first_line(failure)}); set "
                f"target_modules to some of [{', '.join(linear_names(model))}], or name another model."
            ) from None
        finally:
            for handle in handles:
                handle.remove()
        if ahead > TOLERANCE[model.dtype]:
            raise UserError(
                f"The predictions of {name} change by {ahead:.1e} nats per token with the tokens after them; "
                "name a causal language model (a decoder)."
            )
        groups = dict.fromkeys(tuple(called) for _, called in calls)
        if unused := sorted(layers[layer] for layer in layers.keys() - {*chain.from_iterable(groups)}):
            last = {key.rpartition(".")[2] for key in unused}
            others = [each for each in linear_names(model) if each not in last]
            raise UserError(
                f"{name} does not call {len(unused)} of its {len(layers)} layers with adapters as layers, "
                f"such as {unused[0]}, so these adapters have no effect; set target_modules to some of "
                f"[{', '.join(others)}]."
            )
        for called in sorted(groups, key=len, reverse=True):  # recomputation may have stopped inside one
            share_inputs({layers[layer]: layer for layer in called})
        return truth

    def trusted_kernels(self) -> list[SDPBackend]:
        """Return SDPA's plain kernel; if its weights would be large, the next plainest first."""
        config = self.model.config.get_text_config()
        recomputed = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        layers = 1 if recomputed else config.num_hidden_layers
        # Two sequences; scores and weights in fp32.
        heads = getattr(config, "num_attention_heads", None) or 1  # recurrent models may have none
        kept = 2 * heads * self.pairs.input_ids.shape[1] ** 2 * 2 * 4 * layers
        return [*([] if kept <= JUDGE_BYTES else [SDPBackend.EFFICIENT_ATTENTION]), SDPBackend.MATH]

    def fault(self, plan: AttentionPlan, truth: Computed) -> str | None:
        """Return what is wrong with a plan, if anything."""
        limit = length_limit(self.model.config)
        if (
            plan.layout not in ("separate", "plain")
            and limit is not None
            and self.pairs.input_ids.shape[1] > limit
        ):
            return f"beyond {limit} tokens its rotary frequencies depend on the length of a whole row"
        try:
            use_attention(self.model, plan.attention)
            computed = self._computed(plan.layout)
            if self._difference(computed, truth) is None:
                return None
            # Rounding in the model's own forward may explain it.
            with self.by_trusted_kernels():
                drawn = [self._errors(self._computed(None, seed), truth) for seed in range(DRAWS)]
            value, gradient = map(max, zip(*drawn, strict=True))
            return self._difference(computed, truth, (value, gradient))
        except Exception as failure:  # any error of kernels and compilers
            return f"it fails with {type(failure).__name__}: {first_line(failure)}"

    def _difference(self, computed: Computed, truth: Computed, rounding: Errors = (0.0, 0.0)) -> str | None:
        if not truth[0].isfinite().all():
            return None  # it is reported where pairs are scored
        value, gradient = self._errors(computed, truth)
        if not value <= max(TOLERANCE[self.model.dtype], ROUNDING_FACTOR * rounding[0]):
            return f"its log-probabilities differ by {value:.1e} nats per token"
        limit = max(GRADIENT_TOLERANCE[self.model.dtype], ROUNDING_FACTOR * rounding[1])
        return None if gradient <= limit else f"its gradient is {gradient:.0%} off"

    def _errors(self, computed: Computed, truth: Computed) -> Errors:
        tokens = self.pairs.sizes[:, 1:].T
        tokens = torch.cat([tokens[:, :1], tokens], dim=1)
        value = float(((computed[0] - truth[0]).abs() / tokens).max())
        return value, float((computed[1] - truth[1]).norm() / truth[1].norm())

    def _looks_ahead(self) -> float:
        """Mean change of the first half's log-probabilities, in nats, with other tokens after it."""
        tokens = self.pairs.input_ids[:1, : int((self.pairs.segment_ids[0] <= Segment.CHOSEN).sum())]
        half = tokens.shape[1] // 2 + 1
        other = tokens.clone()
        other[:, half:] = tokens[:, :1]
        first, again, changed = (
            upcast(self.model(input_ids=row, use_cache=False).logits[:, : half - 1])
            .log_softmax(-1)
            .gather(2, tokens[:, 1:half, None])
            for row in (tokens, tokens, other)
        )
        # Less what changes from one pass to the next.
        return float((changed - first).abs().mean() - (again - first).abs().mean())

    def _computed(self, layout: Layout | None, rounded: int | None = None) -> Computed:
        """Return the values in a layout, or of each sequence alone.

        Embeddings are moved within their rounding, at random by the seed ``rounded``, if there is one.
        """
        embedded: list[tuple[Tensor, Tensor]] = []

        def watch(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                embedded.append((inputs[0], output.requires_grad_()))
            if rounded is not None:
                random = torch.Generator(output.device).manual_seed(rounded)
                part = torch.rand(output.shape, generator=random, device=output.device) - 0.5
                return (wide(output) * (1 + torch.finfo(output.dtype).eps * part)).to(output.dtype)
            return output.clone()  # some models scale it in place, which a leaf forbids

        # At the embeddings: a new or disabled adapter has no gradient.
        handle = self.model.get_input_embeddings().register_forward_hook(watch)
        try:
            with torch.enable_grad():
                first = self._scored(layout, self.pairs[:1])
                states = [each for _, each in embedded]
                gradients = torch.autograd.grad((first[0] - 0.5 * first[1]).sum(), states)
            first = every = first.detach()
            if len(self.pairs) > 1 and layout is None:
                every = torch.cat([first, self._scored(layout, self.pairs[1:])], dim=1)
            elif len(self.pairs) > 1:
                every = self._scored(layout, self.pairs)
        finally:
            handle.remove()
        # By token id, since layouts repeat prompt tokens differently.
        known = self.pairs.input_ids[0].unique()
        tokens = torch.cat([each.flatten() for each, _ in embedded])
        place = torch.searchsorted(known, tokens).clamp(max=len(known) - 1)
        rows = wide(torch.cat([gradient.flatten(0, 1) for gradient in gradients]))
        sums = rows.new_zeros(len(known), rows.shape[1]).index_add(0, place, rows)
        return torch.cat([first, every], dim=1), sums

    def _scored(self, layout: Layout | None, pairs: PairBatch) -> Tensor:
        """(2, N) log-probabilities of chosen and rejected."""
        if layout is None:
            return torch.cat([self.score(rows).chosen for rows in alone_rows(pairs)]).view(2, -1)
        log_probs = self.score(rows_of(layout, pairs))
        return torch.stack([log_probs.chosen, log_probs.rejected])
