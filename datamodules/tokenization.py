"""Token ids of rows; unusable rows are dropped. Label noise comes later, in the batches."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import UserError
from pacmr_lightning.policy.chat_template import template_warnings

from . import rewording
from .augmentation.augmented_prompts import Augmentations
from .chat import (
    Rendered,
    decode_messages,
    encode_messages,
    render,
    say_what_the_template_leaves_out,
    template_options,
)
from .columns import PREFERENCES, SFT, TIE, VOTES, Columns
from .row_values import response_text
from .split_prompt import DIFFERENT_PROMPTS, NO_ANSWER, NO_COMMON_PROMPT, NO_COMPLETION
from .tokenizer import LEAST, Tokenization, cut, prompt_tokens, response_tokens, tokenizer_digest

_LAYOUT = 13
"""Part of the cache's key; raise it when the same rows give other tokens."""

_EMPTY = {1: "empty completion", 2: "empty response"}
"""Reason by number of responses."""
REASONS = (
    "too long",
    _EMPTY[2],
    "equal responses",
    DIFFERENT_PROMPTS,
    NO_COMMON_PROMPT,
    NO_ANSWER,
    _EMPTY[1],
    "empty prompt",
    NO_COMPLETION,
)
"""Reasons to drop a row."""
NO_AUGMENTED_PROMPT = "no augmented prompt"
"""Count of kept pairs whose augmented prompt is missing, too long or the same tokens."""

CHANGED = "changed messages"
"""Count of kept rows of which the chat template changes or leaves out a text."""
TWO_BOS = "two BOS"
"""Count of kept rows whose prompt begins with BOS twice."""
SPECIAL = "special tokens"
"""Count of kept rows with a special token of the tokenizer inside of a text."""
CUT = "cut responses"
"""Count of kept rows with a response that ``max_length`` cuts, by OpenRLHF's rules."""
ODDITIES = (CHANGED, TWO_BOS, SPECIAL, CUT)
"""Oddities of a kept row's tokens."""


class Counts(dict[str, int]):
    """Counts of rows; ``examples`` has the id of a row with each oddity."""

    def __init__(self, counts: Iterable[tuple[str, int]] = (), examples: dict[str, str] | None = None):
        super().__init__(counts)
        self.examples = examples or {}


OWN_NUMBERS = ("eta", *VOTES, "weight", "p_right")
"""Numbers of rows, None where missing."""

_TOKENS = List(Value("int32"))
_FOUND = {"odd": List(Value("string")), "drop": Value("string")}
_PAIRS = Features(
    {
        "id": Value("string"),
        "texts": Value("string"),
        "prompt": Value("string"),
        "prompt_ids": _TOKENS,
        "chosen_ids": _TOKENS,
        "rejected_ids": _TOKENS,
        "augmented_ids": _TOKENS,
        "has_augmented_prompt": Value("bool"),
        "by_rules": Value("bool"),
        "flipped": Value("int8"),
        "category": Value("string"),
        **dict.fromkeys(OWN_NUMBERS, Value("float64")),
        **_FOUND,
    }
)
_COMPLETIONS = Features({"prompt_ids": _TOKENS, "completion_ids": _TOKENS, **_FOUND})


def tokenize_pairs(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    augmentations: Augmentations | None = None,
    tokenization: Tokenization = "default",
) -> tuple[Dataset, Counts]:
    """Return the pairs that can be trained on as token ids, and counts.

    ``texts`` is a hash of prompt and responses as found. Responses end in EOS, and ``augmented_ids`` are
    empty where ``has_augmented_prompt`` is false; ``by_rules`` marks those that rules made.
    ``flipped`` (1, 0, or -1 if unknown) and ``OWN_NUMBERS`` refer to the label as found, and a tie is half a
    vote for and half a vote against it. The counts are ``rows``,
    ``kept``, each of ``REASONS`` and ``ODDITIES``, and ``NO_AUGMENTED_PROMPT``. Without ``augmentations``,
    the augmented prompt is the row's ``augmented_prompt``, else the rule-based rewording.
    """
    given = None
    if augmentations is not None:
        sets = (augmentations.pairs or (), augmentations.by_rules)
        given = [sorted(augmentations.prompts.items()), *map(sorted, sets)]
    tokenized, counts = _tokenize(
        "pairs",
        rows,
        {"tokenizer": tokenizer, "max_length": max_length, "tokenization": tokenization},
        partial(_tokenize_pairs, augmentations=augmentations),
        _PAIRS,
        [rewording.VERSION, given],
    )
    counts[NO_AUGMENTED_PROMPT] = sum(not view for view in tokenized["has_augmented_prompt"][:])
    return tokenized, counts


def tokenize_completions(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    tokenization: Tokenization = "default",
) -> tuple[Dataset, Counts]:
    """Return demonstrations as ``prompt_ids`` and ``completion_ids`` (EOS at the end), and counts."""
    options = {"tokenizer": tokenizer, "max_length": max_length, "tokenization": tokenization}
    return _tokenize("rows", rows, options, _tokenize_completions, _COMPLETIONS, [])


def _tokenize(
    noun: str,
    rows: Dataset,
    options: dict[str, Any],
    batch: Callable[..., dict[str, list[Any]]],
    features: Features,
    key: list[Any],
) -> tuple[Dataset, Counts]:
    tokenizer, max_length = options["tokenizer"], options["max_length"]
    say_what_the_template_leaves_out(tokenizer, rows)
    rules = [max_length, options["tokenization"]]
    state = [noun, _LAYOUT, rows._fingerprint, tokenizer_digest(tokenizer), *rules, *key]
    tokenized = rows.map(
        batch,
        batched=True,
        fn_kwargs=options,
        remove_columns=rows.column_names,
        features=features,
        # A pickled tokenizer changes with use and between processes.
        new_fingerprint=hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16],
        desc="Tokenizing",
    )
    reasons = tokenized["drop"][:]
    drops = Counter(reasons)
    counts = {"rows": len(reasons), "kept": drops[None]} | {r: drops[r] for r in REASONS if drops[r]}
    if not drops[None]:
        found = ", ".join(f"{drops[reason]} {reason}" for reason in REASONS if drops[reason])
        raise UserError(
            f"None of the {len(reasons)} {noun} can be used at max_length {max_length} ({found}); raise "
            f"max_length or give other {noun}."
        )
    kept = [i for i, reason in enumerate(reasons) if reason is None]
    tokenized = tokenized.select(kept, keep_in_memory=True)
    examples: dict[str, str] = {}
    ids = rows["id"][:]
    for i, found in zip(kept, tokenized["odd"][:], strict=True):
        for name in found:
            counts[name] = counts.get(name, 0) + 1
            examples.setdefault(name, ids[i])
    return tokenized.remove_columns([*_FOUND]), Counts(counts.items(), examples)


def of_min_length(pairs: Dataset, min_length: int) -> Dataset:
    """Return the pairs whose prompt and longer response have at least ``min_length`` tokens."""

    def enough(prompt: list[int], chosen: list[int], rejected: list[int]) -> bool:
        return len(prompt) + max(len(chosen), len(rejected)) >= min_length

    return pairs.filter(enough, input_columns=["prompt_ids", "chosen_ids", "rejected_ids"])


def _tokenize_rows(
    columns: Columns,
    rows: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    tokenization: Tokenization,
    views: Sequence[str] = (),
) -> dict[str, list[Any]]:
    """Return ``prompt`` (text), ``prompt_ids``, ids of each response, ``odd`` and ``drop`` of a batch.

    ``view_ids`` are those of ``views``, augmented prompts.
    """
    count, special = len(columns.responses), _special_tokens(tokenizer)
    texts: list[list[Rendered]] = []
    found: list[tuple[str | None, bool]] = []
    given = (rows[name] for name in ("reason", "chat", "prompt", *columns.responses))
    for options, reason, chat, prompt, *sides in zip(_options(rows), *given, strict=True):
        if reason is not None:
            texts.append([Rendered("", "", False)] * count)
            found.append((reason, False))
            continue
        plain = [response_text(side, chat) for side in sides] if chat else sides
        messages = decode_messages(prompt) if chat else []
        texts.append(
            [render(tokenizer, messages, decode_messages(side)[0], options) for side in sides]
            if chat
            else [Rendered(prompt, text, False) for text in plain]
        )
        empty = None if all(text.strip() for text in plain) else _EMPTY[count]
        # A prompt that is a text may be a conversation that was rendered before.
        odd = any(special.search(str(message.get("content") or "")) for message in messages)
        ends = filter(None, map(special.search, plain))
        odd = odd or any(special.sub("", end.string[end.start() :]).strip() for end in ends)
        found.append((empty, odd))
    prompts = [sides[0].prompt for sides in texts]
    # All sides at once, so that a prompt is encoded once.
    answers_of_sides = [row[side].response for side in range(count) for row in texts]
    encoded = response_tokens(tokenizer, prompts * count, answers_of_sides, tokenization)
    is_chat = rows["chat"] * (2 if views else 1)
    all_ids = prompt_tokens(tokenizer, [*prompts, *views], is_chat, tokenization)
    ids = all_ids[: len(prompts)]
    least, cuts = 0, [False] * len(texts)
    if tokenization == "openrlhf":
        least, eos = LEAST, tokenizer.eos_token_id
        room = [max(least, max_length - len(prompt_ids)) for prompt_ids in ids] * count
        long = [len(answer) > most for answer, most in zip(encoded, room, strict=True)]
        cuts = [any(long[row :: len(texts)]) for row in range(len(texts))]
        encoded = [cut(answer, most, eos) for answer, most in zip(encoded, room, strict=True)]
    responses = [encoded[side * len(texts) : (side + 1) * len(texts)] for side in range(count)]
    out: dict[str, list[Any]] = {"prompt": prompts, "prompt_ids": ids, "odd": [], "drop": []}
    out["view_ids"] = all_ids[len(prompts) :]
    out |= {f"{name}_ids": side for name, side in zip(columns.responses, responses, strict=True)}
    rows_found = zip(found, texts, cuts, ids, *responses, strict=True)
    for (reason, odd), row, is_cut, prompt_ids, *answers in rows_found:
        out["drop"].append(reason or _why_dropped(prompt_ids, answers, max_length, least))
        changes = [CHANGED] * any(side.changed for side in row)
        bos = tokenizer.bos_token_id
        twice = [TWO_BOS] if bos is not None and prompt_ids[:2] == [bos, bos] else []
        out["odd"].append([*changes, *twice, *[SPECIAL] * odd, *[CUT] * is_cut])
    return out


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, (*tokenizer.all_special_tokens, *added))))


def _options(rows: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    return map(template_options, rows["tools"], rows["chat_template_kwargs"])


def _tokenize_completions(
    rows: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    tokenization: Tokenization,
) -> dict[str, list[Any]]:
    out = _tokenize_rows(SFT, rows, tokenizer, max_length, tokenization)
    return {name: out[name] for name in _COMPLETIONS}


def _tokenize_pairs(
    rows: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    tokenization: Tokenization,
    augmentations: Augmentations | None,
) -> dict[str, list[Any]]:
    views, by_rules = [], []
    columns = (rows[name] for name in ("id", "prompt", "chosen", "chat", "reason", "augmented_prompt"))
    for options, name, prompt, chosen, chat, reason, given in zip(_options(rows), *columns, strict=True):
        by_rules.append(not given if augmentations is None else prompt in augmentations.by_rules)
        if reason is not None:
            view = ""
        elif augmentations is None:
            view = given or _reworded(prompt, chat)
        else:
            # The prompt itself counts as none, having the same tokens.
            view = augmentations.of(name, prompt)
        if chat and reason is None:
            view = render(tokenizer, decode_messages(view), decode_messages(chosen)[0], options).prompt
        views.append(view)
    out = _tokenize_rows(PREFERENCES, rows, tokenizer, max_length, tokenization, views)
    view_ids = out.pop("view_ids")
    known = [
        0 < len(view) <= max_length - max(len(chosen), len(rejected)) and view != prompt
        for view, prompt, chosen, rejected in zip(
            view_ids, out["prompt_ids"], out["chosen_ids"], out["rejected_ids"], strict=True
        )
    ]
    return out | {
        **{name: rows[name] for name in ("id", "texts", "category")},
        "augmented_ids": [view if is_other else [] for view, is_other in zip(view_ids, known, strict=True)],
        "has_augmented_prompt": known,
        "by_rules": [rule and is_other for rule, is_other in zip(by_rules, known, strict=True)],
        "flipped": [UNKNOWN if f is None else int(f) for f in rows["flipped"]],
        **{name: rows[name] for name in OWN_NUMBERS if name not in VOTES},
        **{
            name: [
                0.5 if number is None and label == TIE else number
                for number, label in zip(rows[name], rows["label"], strict=True)
            ]
            for name in VOTES
        },
    }


def _why_dropped(prompt: list[int], responses: list[list[int]], max_length: int, least: int) -> str | None:
    # One token is EOS alone: the tokenizer made nothing of the text.
    if min(map(len, responses)) == 1:
        return _EMPTY[len(responses)]
    if len(responses) == 2 and responses[0] == responses[1]:
        return "equal responses"
    if not prompt:
        return "empty prompt"
    return "too long" if len(prompt) + max(least, *map(len, responses)) > max_length else None


@lru_cache(maxsize=1000)
def _reworded(prompt: str, chat: bool) -> str:
    if not chat:
        return rewording.reword(prompt)
    messages = decode_messages(prompt)
    asked = [m | {"content": rewording.reword(m["content"])} if m["role"] == "user" else m for m in messages]
    return encode_messages(asked)


def token_warnings(
    tokenizer: PreTrainedTokenizerBase, rows: Dataset, counts: Counts, place: str
) -> Iterator[str]:
    """Yield a sentence for each oddity of the tokens of a split, which it calls ``place``."""
    if any(rows["chat"][:]):
        yield from template_warnings(tokenizer)
    if CHANGED in counts:
        yield (
            f"{place}: the chat template changes or leaves out a text of the messages in {counts[CHANGED]} "
            f"of {counts['kept']} rows ({counts.examples[CHANGED]} for one), so the model learns what the "
            "template writes; change the rows, or take another template."
        )
    if SPECIAL in counts:
        yield (
            f"{place}: {counts[SPECIAL]} of {counts['kept']} rows have a special token, such as "
            f"{tokenizer.eos_token}, inside of a text ({counts.examples[SPECIAL]} for one), which is read as "
            "that token; take it out of the texts."
        )
    if TWO_BOS in counts:
        yield (
            f"{place}: {counts[TWO_BOS]} of {counts['kept']} prompts begin with BOS ({tokenizer.bos_token}) "
            f"twice ({counts.examples[TWO_BOS]} for one); take it out of the texts."
        )


def summary_line(name: str, split: str, counts: dict[str, int], noun: str = "pairs") -> str:
    """Return a line on the kept and dropped rows of a split."""
    dropped = [f"{counts[reason]} {reason}" for reason in REASONS if reason in counts]
    parts = [f"{counts['kept']} of {counts['rows']} {noun} kept"]
    if dropped:
        parts.append(f"dropped: {', '.join(dropped)}")
    if CUT in counts:
        parts.append(f"{counts[CUT]} cut at max_length")
    if counts.get("flipped"):
        parts.append(f"{counts['flipped'] / counts['kept']:.1%} of labels flipped")
    if "easiest" in counts:
        parts.append(f"the {counts['easiest']} easiest of them, from easy to difficult")
    if counts.get(NO_AUGMENTED_PROMPT) and split == "train":
        parts.append(f"{counts[NO_AUGMENTED_PROMPT]} without an augmented prompt")
    return f"{name}, {split}: " + "; ".join(parts)
