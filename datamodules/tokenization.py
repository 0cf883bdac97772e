"""Turns rows into token ids, and drops the pairs that cannot be trained on; never cuts one.

The token cache (datasets' own) depends on the rows, the tokenizer and ``max_length`` only, not on the noise:
labels are flipped when batches are made.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.chat_template import template_warnings
from pacmr_lightning.errors import UserError

from . import rewording
from .chat import (
    LEFT_OUT,
    decode_messages,
    encode_messages,
    render,
    say_what_the_template_leaves_out,
    template_options,
)
from .prompts import DIFFERENT_PROMPTS, NO_ANSWER, NO_COMMON_PROMPT, Split, split_row
from .tokenizer import prompt_tokens, response_tokens, tokenizer_digest

_LAYOUT = 5
"""Part of the cache's key; raised whenever the same rows are turned into other tokens."""

REASONS = (
    "too long",
    "empty response",
    "equal responses",
    DIFFERENT_PROMPTS,
    NO_COMMON_PROMPT,
    NO_ANSWER,
    "empty prompt",
)
"""Why a pair may be dropped."""
NO_SECOND_VIEW = "no second view"
"""Count of kept pairs whose reworded prompt is missing, too long or the same tokens."""

TWO_BOS = "two BOS"
"""Count of kept rows whose prompt begins with BOS twice."""
ODDITIES = (*(f"{part} left out" for part in LEFT_OUT), TWO_BOS)
"""What may be odd about the tokens of a row that is kept."""

_TOKENS = List(Value("int32"))
FEATURES = Features(
    {
        "id": Value("string"),
        "prompt": Value("string"),
        "prompt_ids": _TOKENS,
        "chosen_ids": _TOKENS,
        "rejected_ids": _TOKENS,
        "augmented_ids": _TOKENS,
        "second_view": Value("bool"),
        "flipped": Value("int8"),
        "category": Value("string"),
        "eta": Value("float64"),
        "odd": List(Value("string")),
        "drop": Value("string"),
    }
)


def tokenize_pairs(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    augmentations: dict[str, str] | None = None,
) -> tuple[Dataset, dict[str, int]]:
    """Token ids of the pairs that can be trained on.

    Args:
        rows: as ``read_preferences`` makes them.
        tokenizer: has EOS.
        max_length: tokens; a pair whose prompt and longer response (EOS included) exceed it is dropped.
        augmentations: the second wording of some prompts, by prompt; other prompts have none. None: the row's
            ``augmented_prompt``, else a rule-based rewording.

    Returns:
        The kept rows, with ``id``, ``prompt`` (text), ``prompt_ids``, ``chosen_ids``, ``rejected_ids`` (each
        response ends in one EOS), ``augmented_ids`` (the second view's prompt; empty where there is none, or
        it is the same tokens or too long), ``second_view`` (whether there is one), ``flipped`` (1, 0, or -1
        where the row says nothing), ``category`` and ``eta`` (None where unknown; both speak of the label as
        found in the file); and how many rows there were, were kept, were dropped for each of ``REASONS``,
        have no second view, and have each of ``ODDITIES``.

    Raises:
        UserError: all rows were dropped.
    """
    say_what_the_template_leaves_out(tokenizer, rows)
    given = None if augmentations is None else sorted(augmentations.items())
    state = [_LAYOUT, rewording.VERSION, rows._fingerprint, tokenizer_digest(tokenizer), max_length, given]
    tokenized = rows.map(
        _tokenize_batch,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length, "augmentations": augmentations},
        remove_columns=rows.column_names,
        features=FEATURES,
        # Given because a pickled tokenizer changes with use and between processes.
        new_fingerprint=hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16],
        desc="Tokenizing",
    )
    reasons = tokenized["drop"][:]
    drops = Counter(reasons)
    kept = [i for i, reason in enumerate(reasons) if reason is None]
    counts = {"rows": len(tokenized), "kept": len(kept)} | {r: drops[r] for r in REASONS if drops[r]}
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items() if reason in REASONS)
        raise UserError(
            f"None of the {len(tokenized)} pairs can be used at max_length {max_length} ({reasons})."
        )
    tokenized = tokenized.select(kept, keep_in_memory=True)
    counts |= count_oddities(tokenized["odd"][:])
    tokenized = tokenized.remove_columns(["odd", "drop"])
    counts[NO_SECOND_VIEW] = sum(not view for view in tokenized["second_view"][:])
    return tokenized, counts


def of_min_length(pairs: Dataset, min_length: int) -> Dataset:
    """Pairs of ``tokenize_pairs`` whose prompt and longer response have ``min_length`` tokens or more."""

    def enough(prompt: list[int], chosen: list[int], rejected: list[int]) -> bool:
        return len(prompt) + max(len(chosen), len(rejected)) >= min_length

    return pairs.filter(enough, input_columns=["prompt_ids", "chosen_ids", "rejected_ids"])


def _tokenize_batch(
    rows: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    augmentations: dict[str, str] | None,
) -> dict[str, list[Any]]:
    """What ``Dataset.map`` calls: columns in, columns out."""
    names = ("prompt", "chosen", "rejected", "chat")
    splits = [split_row(*row) for row in zip(*(rows[name] for name in names), strict=True)]
    chats = rows["chat"]
    if augmentations is None:
        views = _second_views(splits, rows["augmented_prompt"], chats)
    else:
        # A prompt that has none is its own: the same tokens are no second view.
        views = [augmentations.get(split.prompt, split.prompt) for split in splits]
    options = map(template_options, rows["tools"], rows["chat_template_kwargs"])
    texts = [
        _rendered(tokenizer, split, view, option)
        if chat and split.reason is None
        else _Texts(split.prompt, split.chosen, split.rejected, view, [])
        for split, view, chat, option in zip(splits, views, chats, options, strict=True)
    ]
    prompts = [text.prompt for text in texts]
    sides = [text.chosen for text in texts] + [text.rejected for text in texts]
    # Both sides at once, so that a prompt is encoded once for both.
    responses = response_tokens(tokenizer, prompts * 2, sides)
    prompt_ids = prompt_tokens(tokenizer, prompts, chats)
    out = {
        "id": rows["id"],
        "prompt": prompts,
        "prompt_ids": prompt_ids,
        "chosen_ids": responses[: len(splits)],
        "rejected_ids": responses[len(splits) :],
        "augmented_ids": prompt_tokens(tokenizer, [text.augmented for text in texts], chats),
        "second_view": [],
        "flipped": [UNKNOWN if f is None else int(f) for f in rows["flipped"]],
        "category": rows["category"],
        "eta": rows["eta"],
        "odd": [oddities(tokenizer, ids, text.left_out) for ids, text in zip(prompt_ids, texts, strict=True)],
        "drop": [],
    }
    for i, split in enumerate(splits):
        reason = split.reason
        prompt, chosen, rejected = (out[name][i] for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
        longer = max(len(chosen), len(rejected))
        # One token is EOS alone: the tokenizer made nothing of the text.
        if reason is None and not (
            split.chosen.strip() and split.rejected.strip() and min(len(chosen), len(rejected)) > 1
        ):
            reason = "empty response"
        elif reason is None and chosen == rejected:
            reason = "equal responses"
        elif reason is None and not prompt:
            reason = "empty prompt"
        elif reason is None and len(prompt) + longer > max_length:
            reason = "too long"
        out["drop"].append(reason)
        view = out["augmented_ids"][i]
        out["second_view"].append(0 < len(view) <= max_length - longer and view != prompt)
        if not out["second_view"][i]:
            out["augmented_ids"][i] = []
    return out


def _second_views(splits: list[Split], given: list[str | None], chats: list[bool]) -> list[str]:
    """The second wording of each prompt, in the prompt's own form: the given one, else that of the rules."""
    reworded: dict[str, str] = {}
    for split, chat in zip(splits, chats, strict=True):
        if split.prompt in reworded:
            continue
        if chat and split.reason is None:
            messages = decode_messages(split.prompt)
            asked = [
                m | {"content": rewording.reword(m["content"])} if m["role"] == "user" else m
                for m in messages
            ]
            reworded[split.prompt] = encode_messages(asked)
        else:
            reworded[split.prompt] = rewording.reword(split.prompt)
    return [view or reworded[split.prompt] for split, view in zip(splits, given, strict=True)]


class _Texts(NamedTuple):
    """A pair's texts as the model reads them."""

    prompt: str
    chosen: str
    rejected: str
    augmented: str
    """The augmented prompt."""
    left_out: list[str]


def _rendered(tokenizer: PreTrainedTokenizerBase, split: Split, view: str, options: dict[str, Any]) -> _Texts:
    """A pair of conversations under the chat template."""
    prompt = decode_messages(split.prompt)
    chosen = render(tokenizer, prompt, split.chosen_message, options)
    rejected = render(tokenizer, prompt, split.rejected_message, options)
    other = render(tokenizer, decode_messages(view), split.chosen_message, options)
    left_out = chosen.left_out + rejected.left_out
    return _Texts(chosen.prompt, chosen.response, rejected.response, other.prompt, left_out)


def oddities(tokenizer: PreTrainedTokenizerBase, prompt: list[int], left_out: list[str]) -> list[str]:
    """Return those of ``ODDITIES`` that a row has.

    Args:
        tokenizer: that of the row.
        prompt: the ids of its prompt.
        left_out: what the chat template leaves out of its messages, of ``LEFT_OUT``.
    """
    bos = tokenizer.bos_token_id
    twice = [TWO_BOS] if bos is not None and prompt[:2] == [bos, bos] else []
    return [f"{part} left out" for part in dict.fromkeys(left_out)] + twice


def count_oddities(rows: list[list[str]]) -> dict[str, int]:
    """Return how many rows have each of ``ODDITIES``, where any has."""
    found = Counter(odd for row in rows for odd in row)
    return {odd: found[odd] for odd in ODDITIES if found[odd]}


def token_warnings(
    tokenizer: PreTrainedTokenizerBase, rows: Dataset, counts: dict[str, int], place: str
) -> Iterator[str]:
    """Yield a sentence for all that is odd about the tokens of a split's rows.

    Args:
        tokenizer: that of the rows.
        rows: the rows, with the column ``chat``.
        counts: what became of them.
        place: what sentences call the split.
    """
    if any(rows["chat"][:]):
        yield from template_warnings(tokenizer)
    for part in LEFT_OUT:
        if f"{part} left out" in counts:
            yield (
                f"{place}: the chat template leaves {part} out in {counts[f'{part} left out']} of "
                f"{counts['kept']} rows, so the model does not see it; write it where the template "
                "keeps it, or take another template."
            )
    if TWO_BOS in counts:
        yield (
            f"{place}: {counts[TWO_BOS]} of {counts['kept']} prompts begin with BOS ({tokenizer.bos_token}) "
            "twice; take it out of the texts."
        )


def summary_line(name: str, split: str, counts: dict[str, int]) -> str:
    """One line on what became of a split's rows."""
    dropped = [f"{counts[reason]} {reason}" for reason in REASONS if reason in counts]
    parts = [f"{counts['kept']} of {counts['rows']} pairs kept"]
    if dropped:
        parts.append(f"dropped: {', '.join(dropped)}")
    if counts.get("flipped"):
        parts.append(f"{counts['flipped'] / counts['kept']:.1%} of labels flipped")
    if "easiest" in counts:
        parts.append(f"the {counts['easiest']} easiest of them, from easy to difficult")
    if counts[NO_SECOND_VIEW] and split == "train":
        parts.append(f"{counts[NO_SECOND_VIEW]} without a second view")
    return f"{name}, {split}: " + "; ".join(parts)
