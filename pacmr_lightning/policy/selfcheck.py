"""Self-check of attention and token layout on one real pair."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from ..batch import LogProbs, PairBatch, Segment
from ..errors import UserError, is_out_of_memory
from ..numerics import wide
from ..ranks import max_over_ranks
from ..strategies.sharding import is_sharded
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
from .lora import linear_names, lora_linears
from .token_layout import Layout

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Accepted difference of a response's mean token log-probability, in nats, by dtype."""
GRADIENT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Accepted relative error of the gradient at the embeddings, by dtype."""
CAUSAL_FACTOR = 10
"""Multiple of ``TOLERANCE`` that later tokens may change a prediction by, since shapes round differently."""
JUDGE_BYTES = 2**32
"""Maximum bytes of the trusted attention weights."""

PairScore = Callable[[Layout, PairBatch], LogProbs]


# Lightning validates in inference mode, which has no gradient.
@torch.inference_mode(False)
@torch.no_grad()
def choose_plan(
    model: PreTrainedModel,
    asked: str,
    layout: AskedLayout,
    batch: PairBatch,
    score: PairScore,
    compiled: bool,
) -> AttentionPlan:
    """Return and activate the first plan that matches the model's own forward on the batch's longest pair.

    Values and gradients are compared with SDPA's plain kernel, since a kernel may be wrong in backward only.
    """
    own, name = attention_of(model), type(model).__name__
    trusted = own if own in PLAIN else plain_attention(model)
    device = next(iter(lora_linears(model).values())).weight.device
    check = _PairCheck(model, _checked_pair(batch, model, device), score)
    candidates, notes = attention_plans(model, asked, layout, device, compiled)
    was_training = model.training
    model.train()  # as in training, where gradient checkpoints apply; there is no dropout
    try:
        use_attention(model, trusted)
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(check.trusted_kernels()))
            if compiled:  # or this kernel would be compiled in
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            truth = check.trusted()
        for plan, following in zip(candidates, [*candidates[1:], None], strict=True):
            fault = None if plan == AttentionPlan(trusted, "plain") else check.fault(plan, truth)
            if any(map(is_sharded, model.parameters())):  # all ranks must agree on a plan
                agreed = max_over_ranks(int(fault is not None), device)
                fault = (fault or "it fails in another process") if agreed else None
            if fault is None:
                if asked == "auto":
                    rank_zero_info(" ".join([f"Log-probabilities are computed from {plan}.", *notes]))
                use_attention(model, plan.attention)
                return plan
            if following is not None:
                rank_zero_warn(
                    f"{name} with {plan.attention} attention cannot use the {plan.layout} layout ({fault}); "
                    f"falling back to {following}."
                )
    finally:
        model.train(was_training)
    raise UserError(
        f"{name} does not work with {plan.attention} here ({fault}); set attn_implementation to auto or sdpa."
    )


def _checked_pair(batch: PairBatch, model: PreTrainedModel, device: torch.device) -> PairBatch:
    """The batch's longest pair, its prompt repeated until it exceeds the sliding window."""
    config = model.config.get_text_config().to_dict()
    window, limit = config.get("sliding_window"), config.get("max_position_embeddings")
    longest = int((batch.segment_ids != Segment.PAD).sum(1).argmax())
    pair = batch[longest : longest + 1]
    segments, tokens = pair.segment_ids[0], pair.input_ids[0]
    prompt, chosen, rejected = (tokens[segments == s] for s in list(Segment)[1:])
    # Ignores a window that no sequence can exceed.
    if window is not None and (limit is None or window < limit):
        prompt = prompt.repeat(max(1, -(-(window + 1) // len(prompt))))
    found = PairBatch.collate(pair.ids, *([part.tolist()] for part in (prompt, chosen, rejected)))
    return PairBatch(
        found.ids, found.input_ids.to(device), found.segment_ids.to(device), pair.flipped.to(device)
    )


@dataclass
class _PairCheck:
    model: PreTrainedModel
    pair: PairBatch
    score: PairScore

    def trusted(self) -> tuple[Tensor, Tensor]:
        """Return the values of the model's own forward; warn of adapters that it never calls."""
        model, name = self.model, type(self.model).__name__
        called: set[str] = set()
        layers = [(key.rpartition(".")[2], m) for key, m in model.named_modules() if isinstance(m, LoraLayer)]
        adapted = {key for key, _ in layers}
        handles = [
            layer.register_forward_hook(lambda *_, key=key: called.add(key))  # type: ignore[attr-defined]
            for key, layer in layers
        ]
        try:
            truth = self._computed("plain")
            ahead = self._looks_ahead()
        except Exception as failure:  # any error of a model's code
            if is_out_of_memory(failure) or isinstance(failure, torch.distributed.DistError):
                raise
            said = (str(failure).strip().splitlines() or [""])[0].rstrip(".")
            plain = linear_names(model)
            fix = "name another model"
            if others := sorted(adapted - set(plain)):
                fix = f"{', '.join(others)} may be no plain layer: set target_modules to [{', '.join(plain)}]"
            said = f"{type(failure).__name__}: {said}"
            raise UserError(f"{name} cannot be used, for its forward pass fails ({said}); {fix}.") from None
        finally:
            for handle in handles:
                handle.remove()
        # NaN is reported where pairs are scored.
        if ahead > CAUSAL_FACTOR * TOLERANCE[model.dtype]:
            raise UserError(
                f"{name} is not causal: its predictions change by {ahead:.1e} nats per token with the tokens "
                "after them; name a causal language model (a decoder)."
            )
        if unused := sorted(adapted - called):
            rank_zero_warn(
                f"{name} never calls {', '.join(unused)} as a layer, so adapters there have no effect; leave "
                "them out of target_modules."
            )
        return truth

    def trusted_kernels(self) -> list[SDPBackend]:
        """Return SDPA's plain kernel; if its weights would be large, the next plainest first."""
        config = self.model.config.get_text_config()
        recomputed = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        layers = 1 if recomputed else config.num_hidden_layers
        # Two sequences; scores and weights in fp32.
        heads = getattr(config, "num_attention_heads", None) or 1  # recurrent models may have none
        kept = 2 * heads * self.pair.input_ids.shape[1] ** 2 * 2 * 4 * layers
        return [*([] if kept <= JUDGE_BYTES else [SDPBackend.EFFICIENT_ATTENTION]), SDPBackend.MATH]

    def fault(self, plan: AttentionPlan, truth: tuple[Tensor, Tensor]) -> str | None:
        """Return what is wrong with a plan, if anything."""
        try:
            use_attention(self.model, plan.attention)
            values, gradient = self._computed(plan.layout)
        except Exception as failure:  # any error of kernels and compilers
            lines = str(failure).strip().splitlines() or [""]
            return f"it fails with {type(failure).__name__}: {lines[0]}"
        tokens = [int((self.pair.segment_ids == s).sum()) for s in (Segment.CHOSEN, Segment.REJECTED)]
        error = float(((values - truth[0]).abs() / values.new_tensor(tokens)).max())
        if not error <= TOLERANCE[self.model.dtype]:
            return f"its log-probabilities differ by {error:.1e} nats per token"
        error = float((gradient - truth[1]).norm() / truth[1].norm())
        return None if error <= GRADIENT_TOLERANCE[self.model.dtype] else f"its gradient is {error:.0%} off"

    def _looks_ahead(self) -> float:
        """Mean change of the first half's log-probabilities, in nats, without the rest."""
        tokens = self.pair.input_ids[:, : int((self.pair.segment_ids <= Segment.CHOSEN).sum())]
        half = tokens.shape[1] // 2 + 1
        whole, part = (
            upcast(self.model(input_ids=row, use_cache=False).logits[:, : half - 1])
            .log_softmax(-1)
            .gather(2, tokens[:, 1:half, None])
            for row in (tokens, tokens[:, :half])
        )
        return float((whole - part).abs().mean())

    def _computed(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """(2,) log-probabilities, and their gradient by token id, (V', H)."""
        embedded: list[tuple[Tensor, Tensor]] = []

        def watch(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            embedded.append((inputs[0], output.requires_grad_()))
            return output.clone()  # some models scale it in place, which a leaf forbids

        # At the embeddings: a new or disabled adapter has no gradient.
        handle = self.model.get_input_embeddings().register_forward_hook(watch)
        try:
            with torch.enable_grad():
                found = self.score(layout, self.pair)
                tokens, states = embedded[0]
                (gradient,) = torch.autograd.grad((found.chosen - 0.5 * found.rejected).sum(), states)
        finally:
            handle.remove()
        # By token id, since layouts repeat prompt tokens differently.
        known = self.pair.input_ids.unique()
        place = torch.searchsorted(known, tokens.flatten()).clamp(max=len(known) - 1)
        rows = wide(gradient.flatten(0, 1))
        sums = rows.new_zeros(len(known), rows.shape[1]).index_add(0, place, rows)
        return torch.cat([found.chosen, found.rejected]).detach(), sums
