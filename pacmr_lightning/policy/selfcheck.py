"""Self-check of attention and token layout on one real pair."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from ..memory import free_memory
from ..numerics import wide
from ..ranks import max_over_ranks
from ..strategies.sharding import is_sharded
from .attention import (
    PLAIN,
    AskedLayout,
    AttentionPlan,
    attention_of,
    attention_plans,
    is_flash,
    plain_attention,
    use_attention,
)
from .chunked_log_probs import upcast
from .lora import linear_names, lora_linears
from .packed_attention import HALF
from .token_layout import Layout

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Accepted difference of a response's mean token log-probability, in nats, by dtype."""
GRADIENT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Accepted relative error of the gradient at the embeddings, by dtype."""
ROUNDING_FACTOR = 3
"""Accepted multiple of what rounding alone changes in the model's own forward, beyond these tolerances."""
DRAWS = 3
"""Runs of the model's own forward that measure this."""
CAUSAL_FACTOR = 10
"""Multiple of ``TOLERANCE`` that later tokens may change a prediction by, since shapes round differently."""
JUDGE_BYTES = 2**32
"""Maximum bytes of the trusted attention weights."""

PairScore = Callable[[Layout, PairBatch], LogProbs]
Computed = tuple[Tensor, Tensor]
"""(2,) log-probabilities of chosen and rejected, and (V', H) their gradient by token id."""
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
    score: PairScore,
    compiled: bool,
) -> AttentionPlan:
    """Return and activate the first plan that matches the model's own forward on the batch's longest pair.

    Values and gradients are compared with SDPA's plain kernel, since a kernel may be wrong in backward only.
    Large activations may amplify rounding beyond any fixed tolerance. The limit is then ``ROUNDING_FACTOR``
    times what rounding changes in the model's own forward. In half precision this may be too much to reveal a
    wrong mask, so the plan must also agree with the base cast to fp32. All processes use the same plan.
    """
    own, name = attention_of(model), type(model).__name__
    trusted = own if own in PLAIN else plain_attention(model)
    device = next(iter(lora_linears(model).values())).weight.device
    check = _PairCheck(model, _checked_pair(batch, model, device), score, trusted, compiled)
    candidates, notes = attention_plans(model, asked, layout, device, compiled)
    was_training = model.training
    model.train()  # as in training, where gradient checkpoints apply; there is no dropout
    try:
        with check.by_trusted_kernels():
            truth = check.trusted()
        for plan, following in zip(candidates, [*candidates[1:], None], strict=True):
            fault = None if plan == AttentionPlan(trusted, "plain") else check.fault(plan, truth)
            if max_over_ranks(int(fault is not None), device):
                fault = fault or "it fails in another process"
            if fault is None:
                if asked == "auto":
                    rank_zero_info(" ".join([f"Log-probabilities are computed from {plan}.", *notes]))
                # A repeated prompt amplifies rounding more than pairs do.
                repeated = check.pair.input_ids.shape[1] > batch.input_ids.shape[1]
                if check.rounding > GRADIENT_TOLERANCE[model.dtype] and not repeated:
                    rank_zero_warn(
                        f"Rounding in {str(model.dtype).removeprefix('torch.')} changes the gradient of "
                        f"{name}'s own forward by {check.rounding:.0%} on the checked pair; if training is "
                        "unstable, set dtype to float32."
                    )
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


@contextmanager
def _weights_in_fp32(model: PreTrainedModel) -> Iterator[None]:
    """Inside, weights in half precision are fp32, with the same values."""
    half = [(t, t.dtype) for t in (*model.parameters(), *model.buffers()) if t.dtype in HALF]
    try:
        for tensor, _ in half:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in half:
            tensor.data = tensor.data.to(dtype)


@dataclass
class _PairCheck:
    model: PreTrainedModel
    pair: PairBatch
    score: PairScore
    attention: str
    """Trusted attention."""
    compiled: bool
    rounding: float = 0.0
    """Relative error of the own forward's gradient against fp32, where that was computed."""

    @contextmanager
    def by_trusted_kernels(self) -> Iterator[None]:
        use_attention(self.model, self.attention)
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(self.trusted_kernels()))
            if self.compiled:  # or this kernel would be compiled in
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def trusted(self) -> Computed:
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

    def fault(self, plan: AttentionPlan, truth: Computed) -> str | None:
        """Return what is wrong with a plan, if anything."""
        try:
            use_attention(self.model, plan.attention)
            found = self._computed(plan.layout)
            if (fault := self._difference(found, truth)) is None or not self._fits_fp32():
                return fault
            return self._fault_in_fp32(plan, truth) or self._beyond_rounding(found, truth)
        except Exception as failure:  # any error of kernels and compilers
            lines = str(failure).strip().splitlines() or [""]
            return f"it fails with {type(failure).__name__}: {lines[0]}"

    def _difference(self, found: Computed, truth: Computed, rounding: Errors = (0.0, 0.0)) -> str | None:
        value, gradient = self._errors(found, truth)
        if not value <= max(TOLERANCE[self.model.dtype], ROUNDING_FACTOR * rounding[0]):
            return f"its log-probabilities differ by {value:.1e} nats per token"
        limit = max(GRADIENT_TOLERANCE[self.model.dtype], ROUNDING_FACTOR * rounding[1])
        return None if gradient <= limit else f"its gradient is {gradient:.0%} off"

    def _errors(self, found: Computed, truth: Computed) -> Errors:
        tokens = [int((self.pair.segment_ids == s).sum()) for s in (Segment.CHOSEN, Segment.REJECTED)]
        value = float(((found[0] - truth[0]).abs() / found[0].new_tensor(tokens)).max())
        return value, float((found[1] - truth[1]).norm() / truth[1].norm())

    def _beyond_rounding(self, found: Computed, truth: Computed) -> str | None:
        """Return a difference that rounding in the model's own forward does not explain, if any."""
        if self._difference(found, truth) is None:
            return None
        with self.by_trusted_kernels():
            drawn = [self._errors(self._computed("plain", seed), truth) for seed in range(DRAWS)]
        value, gradient = map(max, zip(*drawn, strict=True))
        return self._difference(found, truth, (value, gradient))

    def _fits_fp32(self) -> bool:
        """True for a base that is not sharded or quantized, with room for fp32 weights and activations."""
        weights = list(self.model.parameters())
        if not all(p.is_floating_point() and not is_sharded(p) for p in weights):
            return False
        more = sum(p.numel() * p.element_size() for p in weights if p.dtype in HALF)
        return free_memory(weights[0].device) >= 2 * more

    def _fault_in_fp32(self, plan: AttentionPlan, truth: Computed) -> str | None:
        if self.model.dtype not in HALF:
            return None
        with _weights_in_fp32(self.model):
            with self.by_trusted_kernels():
                exact = self._computed("plain")
            # FlashAttention has no fp32.
            use_attention(self.model, self.attention if is_flash(plan.attention) else plan.attention)
            fault = self._beyond_rounding(self._computed(plan.layout), exact)
        use_attention(self.model, plan.attention)
        self.rounding = self._errors(truth, exact)[1]
        return fault and f"in float32 {fault}"

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

    def _computed(self, layout: Layout, rounded: int | None = None) -> Computed:
        """(2,) log-probabilities, and their gradient by token id, (V', H).

        Embeddings are moved within their rounding, at random by the seed ``rounded``, if there is one.
        """
        embedded: list[tuple[Tensor, Tensor]] = []

        def watch(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
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
