"""Generation of responses: decoding, end of a response, repetition."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ..errors import UserError, check_at_least, check_within
from ..policy import PolicyModel
from ..policy.chat_template import end_tokens
from ..policy.chunked_log_probs import upcast
from ..policy.numerics import numerics
from ..policy.positions import check_largest, positions
from ..policy.selfcheck import TOLERANCE
from .answer_store import content_key
from .prompt_batch import PromptBatch, Response

ROUNDING = 3
"""Multiple of ``TOLERANCE`` by which padding may change a next token's log-probability, on average."""


@dataclass(frozen=True)
class Decoding:
    """Decoding options (Qu et al., section "Evaluation Protocol and Judge Prompt")."""

    temperature: float = 0.0
    """0 takes the likeliest token, above 0 tokens are sampled."""
    top_p: float = 1.0
    """Tokens are sampled among the likeliest that together have this probability, in (0, 1]."""
    seed: int = 42
    """Seed of the sampling."""

    def __post_init__(self) -> None:
        check_within("[0, inf)", " (0 is greedy)", temperature=self.temperature)
        check_within("(0, 1]", top_p=self.top_p)
        if self.top_p < 1 and self.temperature == 0:
            raise UserError(
                f"top_p is {self.top_p}, but greedy decoding does not sample; set a temperature above 0, or "
                "leave top_p out."
            )


def respond(
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: PromptBatch,
    max_new_tokens: int,
    decoding: Decoding,
) -> list[Response]:
    """Return the policy's responses to N prompts, at most ``max_new_tokens`` tokens each.

    Up to rounding, greedy responses do not depend on the rest of the batch. Samples depend on the seed and
    the batch's ids; the global random state is unchanged.
    """
    check_room(policy, batch, max_new_tokens)
    device = batch.input_ids.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(content_key(decoding.seed, batch.ids)[:15], 16))
        sequences = generated(policy, tokenizer, batch, max_new_tokens, decoding)
    responses, ends = [], _ends(policy, tokenizer)
    lengths = batch.attention_mask.sum(1).tolist()
    for prompt, tokens, length in zip(batch.input_ids.tolist(), sequences, lengths, strict=True):
        ended = tokens[-1] in ends
        text = decode_response(tokenizer, prompt, tokens[:-1] if ended else tokens)
        responses.append(Response(text, "stop" if ended else "length", length, len(tokens)))
    return responses


def generated(
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: PromptBatch,
    max_new_tokens: int,
    decoding: Decoding,
) -> list[list[int]]:
    """Return the tokens of N responses, up to an end token if there is one, without ``decoding.seed``."""
    ends = _ends(policy, tokenizer)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_id": ends}
    options |= {"pad_token_id": tokenizer.pad_token_id, "do_sample": decoding.temperature > 0}
    if decoding.temperature > 0:
        # transformers' default top_k is 50.
        options |= {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": 0}
    responses = []
    for ids, mask in _together(policy, batch):
        sequences = policy.generate(input_ids=ids, attention_mask=mask, **options)
        rows = sequences[:, ids.shape[1] :].tolist()
        # After an end token comes padding.
        stops = [next((i for i, token in enumerate(row) if token in ends), len(row)) for row in rows]
        responses += [row[: stop + 1] for row, stop in zip(rows, stops, strict=True)]
    return responses


def _together(policy: PolicyModel, batch: PromptBatch) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and masks of prompts to generate together: all, or each alone if neighbours count."""
    ids, mask = batch.input_ids, batch.attention_mask
    if len(batch) == 1 or not _neighbours_count(policy, ids[mask.sum(1).argmax()]):
        return [(ids, mask)]
    lengths = mask.sum(1).tolist()
    return [(ids[i : i + 1, -n:], mask[i : i + 1, -n:]) for i, n in enumerate(lengths)]


def _neighbours_count(policy: PolicyModel, prompt: Tensor) -> bool:
    """Return whether a prompt (L,) changes how its own first half is continued beside it; computed once.

    Recurrent models may take no mask, so that padding on the left is text to them.
    """
    if policy.generates_alone is None:
        short = prompt[: max(1, len(prompt) // 2)]
        padded = pad_sequence([short, prompt], True, 0, padding_side="left")
        real = pad_sequence([torch.ones_like(short), torch.ones_like(prompt)], True, 0, padding_side="left")
        options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        alone, beside = (
            policy.generate(input_ids=ids, attention_mask=mask, **options).logits
            for ids, mask in ((short[None], real[:1, -len(short) :]), (padded, real))
        )
        change = max(
            float((upcast(a[0]).log_softmax(-1) - upcast(b[0]).log_softmax(-1)).abs().mean())
            for a, b in zip(alone, beside, strict=True)
        )
        policy.generates_alone = change > ROUNDING * TOLERANCE[policy.dtype]
        if policy.generates_alone:
            rank_zero_info(
                f"{policy.name} continues a prompt otherwise beside a longer one than alone (by {change:.1e} "
                "nats), so prompts are answered one at a time."
            )
    return policy.generates_alone


def _ends(policy: PolicyModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return end_tokens(tokenizer, policy.model.generation_config.eos_token_id)


def decode_response(tokenizer: PreTrainedTokenizerBase, prompt: list[int], response: list[int]) -> str:
    """Return a response decoded after its prompt, as SentencePiece tokenizers drop a leading space."""
    before, both, alone = (
        tokenizer.decode(tokens, skip_special_tokens=True)
        for tokens in (prompt[-1:], [*prompt[-1:], *response], response)
    )
    assert isinstance(before, str) and isinstance(both, str) and isinstance(alone, str)  # one text each
    return both[len(before) :] if both.startswith(before) else alone


def check_room(policy: PolicyModel, batch: PromptBatch, max_new_tokens: int) -> None:
    """Raise UserError if ``max_new_tokens`` is below 1 or the model has too few positions or embeddings."""
    check_at_least(1, max_new_tokens=max_new_tokens)
    check_largest(policy.name, policy.model, int(batch.input_ids.max()))
    limit = positions(policy.model.config)
    longest = batch.input_ids.shape[1]
    if limit is not None and longest + max_new_tokens > limit:
        name = batch.ids[int(batch.attention_mask.sum(1).argmax())]
        raise UserError(
            f"The prompt {name} has {longest} tokens and max_new_tokens is {max_new_tokens}, but "
            f"{policy.name} has {limit} positions for both together; lower "
            f"{'predict_max_length or ' * (max_new_tokens < limit)}max_new_tokens."
        )


def generation_key(
    policy: PolicyModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, decoding: Decoding
) -> str:
    """Return a hash of weights, their use and decoding: all that a response depends on beside its prompt."""
    return content_key(
        *(policy.reference_digest(), policy.adapter_digest(), policy.lora),
        policy.model.config.to_json_string(use_diff=False),
        [str(policy.dtype), policy.lora_compute_dtype, policy.attn_implementation, numerics(policy.device)],
        sorted(_ends(policy, tokenizer)),
        max_new_tokens,
        asdict(decoding),
    )


def repeated_bigrams(responses: Iterable[Sequence[Hashable]]) -> float:
    """Return the share of bigrams repeated within a response (Welleck et al., arXiv 1908.04319), or NaN."""
    by_response = [list(pairwise(response)) for response in responses]
    total = sum(map(len, by_response))
    return 1 - sum(len(set(bigrams)) for bigrams in by_response) / total if total else float("nan")
