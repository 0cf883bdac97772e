"""Finds out, on one real pair, which attention and token layout a model computes correctly."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..batch import PairBatch, Segment
from ..errors import UserError, is_out_of_memory
from ..numerics import wide
from ..ranks import max_over_ranks
from .attention import PLAIN, AttentionPlan, attention_plans, plain_attention, use_attention
from .logprobs import upcast
from .new_adapter import linear_names
from .rows import Layout
from .scoring import ScoringModel

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Accepted difference of a response's mean token log-probability, in nats, by the base's dtype."""
GRADIENT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Accepted relative error of the gradient at the embeddings, by the base's dtype."""
CAUSAL_FACTOR = 10
"""How many times ``TOLERANCE`` later tokens may change a prediction, since sizes round differently."""
JUDGE_BYTES = 2**32
"""What the attention weights that others are compared with may take."""


def check_pair(batch: PairBatch, window: int | None, device: torch.device) -> PairBatch:
    """The batch's longest pair, its prompt repeated until a response lies further from it than the window."""
    longest = int((batch.segment_ids != Segment.PAD).sum(1).argmax())
    pair = batch[longest : longest + 1]
    segments, tokens = pair.segment_ids[0], pair.input_ids[0]
    prompt, chosen, rejected = (tokens[segments == s] for s in list(Segment)[1:])
    if window is not None:
        prompt = prompt.repeat(max(1, -(-(window + 1) // len(prompt))))
    parts = [[part.tolist()] for part in (prompt, chosen, rejected)]
    checked = PairBatch.collate(pair.ids, *parts)
    return PairBatch(
        checked.ids, checked.input_ids.to(device), checked.segment_ids.to(device), pair.flipped.to(device)
    )


# Lightning validates in inference mode, in which no gradient can be checked.
@torch.inference_mode(False)
@torch.no_grad()
def choose_plan(policy: ScoringModel, batch: PairBatch) -> AttentionPlan:
    """The first of the possible ways that computes what the model's own forward does on plain sequences.

    The policy uses its attention from then on. Values and gradient are checked, since a shape or a device may
    have a right forward pass only, against torch's SDPA (or transformers' eager attention) without any kernel
    made for the machine. Warns of what was tried and cannot be used.

    Raises:
        UserError: no plan works with the attention that was asked for.
    """
    config = policy.model.config.get_text_config().to_dict()
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    # A window that no sequence can outgrow is no window.
    if window is not None and longest is not None and window >= longest:
        window = None
    device = policy.device
    pair = check_pair(batch, window, device)
    candidates, notes = attention_plans(policy.model, policy.attn_implementation, policy.layout, device)
    own = policy.attention
    trusted = own if own in PLAIN else plain_attention(policy.model)
    was_training = policy.training
    policy.train()  # as it is trained: gradient checkpoints are kept in this mode only, and no dropout is
    try:
        return _first_right(policy, pair, candidates, notes, trusted)
    finally:
        policy.train(was_training)


def _first_right(
    policy: ScoringModel, pair: PairBatch, candidates: list[AttentionPlan], notes: list[str], trusted: str
) -> AttentionPlan:
    use_attention(policy.model, trusted)
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(_judges(policy, pair)))
        if policy.compiles:  # or this kernel would stay in what is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        truth = _trusted(policy, pair)
    for plan, following in zip(candidates, [*candidates[1:], None], strict=True):
        fault = None if plan == AttentionPlan(trusted, "plain") else _fault(policy, plan, pair, truth)
        if policy.is_sharded:  # a plan that only some ranks take would leave the others waiting
            agreed = max_over_ranks(int(fault is not None), pair.input_ids.device)
            fault = (fault or "it fails in another process") if agreed else None
        if fault is None:
            if policy.attn_implementation == "auto":
                rank_zero_info(" ".join([f"Log-probabilities are computed from {plan}.", *notes]))
            use_attention(policy.model, plan.attention)
            return plan
        if following is not None:
            rank_zero_warn(
                f"{type(policy.model).__name__} with {plan.attention} attention cannot use the {plan.layout} "
                f"layout ({fault}); falling back to {following}."
            )
    raise UserError(
        f"{type(policy.model).__name__} does not work with {plan.attention} here ({fault}); set "
        "attn_implementation to auto or sdpa."
    )


def _trusted(policy: ScoringModel, pair: PairBatch) -> tuple[Tensor, Tensor]:
    """Return what the model's own forward computes; see ``_computed``. Warns of adapters that it never calls.

    Raises:
        UserError: it fails, or a token's prediction depends on later tokens.
    """
    name = type(policy.model).__name__
    called: set[str] = set()
    adapted = [key for key, module in policy.model.named_modules() if isinstance(module, LoraLayer)]
    handles = [
        policy.model.get_submodule(key).register_forward_hook(lambda *_, key=key: called.add(_last(key)))
        for key in adapted
    ]
    try:
        truth = _computed(policy, "plain", pair)
        ahead = _looks_ahead(policy, pair)
    except Exception as failure:  # whatever a model's code raises
        if is_out_of_memory(failure) or isinstance(failure, torch.distributed.DistError):
            raise
        said = (str(failure).strip().splitlines() or [""])[0].rstrip(".")
        plain = linear_names(policy.model)
        others = sorted({_last(key) for key in adapted} - set(plain))
        fix = "name another model"
        if others:
            fix = f"{', '.join(others)} may be no plain layer: set target_modules to [{', '.join(plain)}]"
        raise UserError(
            f"{name} cannot be used, for its forward pass fails ({type(failure).__name__}: {said}); {fix}."
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    # Values that are no numbers are named where pairs are scored.
    if ahead > CAUSAL_FACTOR * TOLERANCE[policy.model.dtype]:
        raise UserError(
            f"{name} is not causal: its predictions change by {ahead:.1e} nats a token with the tokens after "
            "them; name a causal language model (a decoder)."
        )
    if unused := sorted({_last(key) for key in adapted} - called):
        rank_zero_warn(
            f"{name} never calls {', '.join(unused)} as a layer, so adapters there have no effect; leave "
            "them out of target_modules."
        )
    return truth


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _looks_ahead(policy: ScoringModel, pair: PairBatch) -> float:
    """Return the mean change of the first half's log-probabilities, in nats, where the rest is cut off."""
    tokens = pair.input_ids[:, : int((pair.segment_ids <= Segment.CHOSEN).sum())]
    half = tokens.shape[1] // 2 + 1
    whole, part = (
        upcast(policy.model(input_ids=row, use_cache=False).logits[:, : half - 1])
        .log_softmax(-1)
        .gather(2, tokens[:, 1:half, None])
        for row in (tokens, tokens[:, :half])
    )
    return float((whole - part).abs().mean())


def _judges(policy: ScoringModel, pair: PairBatch) -> list[SDPBackend]:
    """SDPA's plain code; where its attention weights would be large, the next plainest kernel before it."""
    config = policy.model.config.get_text_config()
    layers = 1 if policy.gradient_checkpointing else config.num_hidden_layers
    # Two sequences; scores and weights in fp32.
    heads = getattr(config, "num_attention_heads", None) or 1  # recurrent models may have none
    kept = 2 * heads * pair.input_ids.shape[1] ** 2 * 2 * 4 * layers
    return [*([] if kept <= JUDGE_BYTES else [SDPBackend.EFFICIENT_ATTENTION]), SDPBackend.MATH]


def _fault(
    policy: ScoringModel, plan: AttentionPlan, pair: PairBatch, truth: tuple[Tensor, Tensor]
) -> str | None:
    """What is wrong with a plan, if anything."""
    dtype = policy.model.dtype
    try:
        use_attention(policy.model, plan.attention)
        values, gradient = _computed(policy, plan.layout, pair)
    except Exception as failure:  # kernels and compilers have exceptions of their own
        lines = str(failure).strip().splitlines() or [""]
        return f"it fails with {type(failure).__name__}: {lines[0]}"
    tokens = [int((pair.segment_ids == s).sum()) for s in (Segment.CHOSEN, Segment.REJECTED)]
    error = float(((values - truth[0]).abs() / values.new_tensor(tokens)).max())
    if not error <= TOLERANCE[dtype]:
        return f"its log-probabilities differ by {error:.1e} nats a token"
    error = float((gradient - truth[1]).norm() / truth[1].norm())
    return None if error <= GRADIENT_TOLERANCE[dtype] else f"its gradient is {error:.0%} off"


def _computed(policy: ScoringModel, layout: Layout, pair: PairBatch) -> tuple[Tensor, Tensor]:
    """(2,) log-probabilities, and the gradient of a combination of them by token id, (V', H)."""
    embedded: list[tuple[Tensor, Tensor]] = []

    def watch(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        embedded.append((inputs[0], output.requires_grad_()))
        return output.clone()  # some models scale it in place, which a leaf does not allow

    # At the embeddings, since an adapter that is off, or has not learned yet, has no gradient.
    handle = policy.model.get_input_embeddings().register_forward_hook(watch)
    try:
        with torch.enable_grad():
            found = policy.log_probs_in(layout, pair)
            tokens, states = embedded[0]
            (gradient,) = torch.autograd.grad((found.chosen - 0.5 * found.rejected).sum(), states)
    finally:
        handle.remove()
    # Tokens of a prompt occur once or twice by layout, and padding has no gradient.
    known = pair.input_ids.unique()
    place = torch.searchsorted(known, tokens.flatten()).clamp(max=len(known) - 1)
    rows = wide(gradient.flatten(0, 1))
    sums = rows.new_zeros(len(known), rows.shape[1]).index_add(0, place, rows)
    return torch.cat([found.chosen, found.rejected]).detach(), sums
