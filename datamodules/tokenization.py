"""Token ids of rows; unusable rows are dropped. Label noise comes later, in the batches."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.answer_store import content_key
from pacmr_lightning.evaluation.conversation import Messages
from pacmr_lightning.policy.chat_template import Rendered, end_tokens, render, with_one_prompt

from . import rewording
from .augmentation.augmented_prompts import Augmentations
from .augmentation.structure import texts_of, with_texts
from .chat import decode_messages, template_options
from .columns import PREFERENCES, SFT, TIE, VOTES, Columns
from .reading import response_text
from .token_report import CHANGED, CUT, EMPTY, NO_AUGMENTED_PROMPT, REASONS, REPEATED, SPECIAL, TWO_BOS
from .tokenizer import tokenizer_digest

_LAYOUT = 17
"""Part of the cache's key; raise it when the same rows give other tokens."""

Tokenization = Literal["default", "openrlhf"]
"""Whose rules make rows to tokens: the project's, or those of OpenRLHF's datasets."""
LEAST = 3
"""Tokens that a prompt must leave of ``max_length``, by OpenRLHF's rules."""
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
_COMPLETIONS = Features({"id": Value("string"), "prompt_ids": _TOKENS, "completion_ids": _TOKENS, **_FOUND})


def tokenize_pairs(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    augmentations: Augmentations | None = None,
    tokenization: Tokenization = "default",
    noun: str = "pairs",
) -> tuple[Dataset, dict[str, int]]:
    """Return the pairs that can be trained on as token ids, and counts; an error calls them ``noun``.

    ``texts`` is a hash of prompt and responses as found. Responses end in EOS, and ``augmented_ids`` are
    empty where ``has_augmented_prompt`` is false; ``by_rules`` marks those that rules made. ``flipped`` (1,
    0, or -1 if unknown) and ``OWN_NUMBERS`` refer to the label as found, and a tie is half a vote for and
    half a vote against it. ``odd`` lists what is odd about a row's tokens.

    The counts are ``rows``, ``kept``, each of ``REASONS``, oddities, and ``NO_AUGMENTED_PROMPT``. Without
    ``augmentations``, the augmented prompt is the row's ``augmented_prompt``, else the rule-based rewording.
    """
    given: tuple[Any, ...] = ()
    if augmentations is not None:
        given = (augmentations.prompts.items(), augmentations.pairs or (), augmentations.by_rules)
    tokenized, counts = _tokenize(
        noun,
        rows,
        {"tokenizer": tokenizer, "max_length": max_length, "tokenization": tokenization},
        partial(_tokenize_pairs, augmentations=augmentations),
        _PAIRS,
        [rewording.VERSION, *map(sorted, given)],
    )
    counts[NO_AUGMENTED_PROMPT] = sum(not view for view in tokenized["has_augmented_prompt"][:])
    return tokenized, counts


def tokenize_completions(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    tokenization: Tokenization = "default",
    noun: str = "rows",
) -> tuple[Dataset, dict[str, int]]:
    """Return demonstrations as ``prompt_ids`` and ``completion_ids`` (EOS at the end), and counts."""
    options = {"tokenizer": tokenizer, "max_length": max_length, "tokenization": tokenization}
    return _tokenize(noun, rows, options, _tokenize_completions, _COMPLETIONS, [])


def _tokenize(
    noun: str,
    rows: Dataset,
    options: dict[str, Any],
    batch: Callable[..., dict[str, list[Any]]],
    features: Features,
    key: list[Any],
) -> tuple[Dataset, dict[str, int]]:
    tokenizer, max_length = options["tokenizer"], options["max_length"]
    rules = [max_length, options["tokenization"]]
    state = [[*features], _LAYOUT, rows._fingerprint, tokenizer_digest(tokenizer), *rules, *key]
    tokenized = rows.map(
        batch,
        batched=True,
        fn_kwargs=options,
        remove_columns=rows.column_names,
        features=features,
        # A pickled tokenizer changes with use and between processes.
        new_fingerprint=content_key(*state)[:16],
        desc="Tokenizing",
    )
    reasons = tokenized["drop"][:]
    drops = Counter(reasons)
    counts = {"rows": len(reasons), "kept": drops[None]} | {r: drops[r] for r in REASONS if drops[r]}
    if not drops[None]:
        summary = ", ".join(f"{drops[reason]} {reason}" for reason in REASONS if drops[reason])
        share = " or validation_fraction," if noun.startswith("validation") else ""
        raise UserError(
            f"None of the {len(reasons)} {noun} can be used at max_length {max_length} ({summary}); raise "
            f"max_length{share} or give other {noun}."
        )
    kept = [i for i, reason in enumerate(reasons) if reason is None]
    tokenized = tokenized.select(kept, keep_in_memory=True).remove_columns("drop")
    return tokenized, counts | Counter(name for oddities in tokenized["odd"][:] for name in oddities)


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
    count = len(columns.responses)
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = re.compile("|".join(map(re.escape, (*tokenizer.all_special_tokens, *added))))
    texts: list[list[Rendered]] = []
    verdicts: list[tuple[str | None, bool]] = []
    names = ("id", "reason", "chat", "tools", "chat_template_kwargs", "prompt", *columns.responses)
    for name, reason, chat, tools, kwargs, prompt, *sides in zip(*(rows[n] for n in names), strict=True):
        if reason is not None:
            texts.append([Rendered("", "", False)] * count)
            verdicts.append((reason, False))
            continue
        messages: Messages = []
        plain = sides
        if chat:
            messages, options = decode_messages(prompt), template_options(tools, kwargs)
            texts.append(_rendered(tokenizer, name, messages, sides, options))
            plain = [response_text(side, chat) for side in sides]
        else:
            texts.append([Rendered(prompt, text, False) for text in sides])
        empty = None if all(text.strip() for text in plain) else EMPTY[count]
        # A prompt that is a text may be a conversation that was rendered before.
        odd = any(special.search(str(message.get("content") or "")) for message in messages)
        ends = filter(None, map(special.search, plain))
        odd = odd or any(special.sub("", end.string[end.start() :]).strip() for end in ends)
        verdicts.append((empty, odd))
    prompts = [sides[0].prompt for sides in texts]
    # All sides at once, so that a prompt is encoded once.
    sides = [row[side].response for side in range(count) for row in texts]
    encoded = response_tokens(tokenizer, prompts * count, sides, tokenization)
    responses = [encoded[i :: len(texts)] for i in range(len(texts))]
    is_chat = rows["chat"] * (2 if views else 1)
    all_ids = prompt_tokens(tokenizer, [*prompts, *views], is_chat, tokenization)
    ids = all_ids[: len(prompts)]
    least, cuts = 0, [False] * len(texts)
    if tokenization == "openrlhf":
        least, eos = LEAST, tokenizer.eos_token_id
        for i, prompt_ids in enumerate(ids):
            room = max(least, max_length - len(prompt_ids))
            cuts[i] = any(len(response) > room for response in responses[i])
            # OpenRLHF overwrites the last token with EOS.
            responses[i] = [[*response[:room][:-1], eos] for response in responses[i]]
    out: dict[str, list[Any]] = {"prompt": prompts, "prompt_ids": ids, "odd": [], "drop": []}
    out["view_ids"] = all_ids[len(prompts) :]
    out |= {f"{name}_ids": [row[side] for row in responses] for side, name in enumerate(columns.responses)}
    together = zip(verdicts, texts, cuts, ids, responses, strict=True)
    for (reason, odd), rendered, is_cut, prompt_ids, row in together:
        out["drop"].append(reason or _why_dropped(prompt_ids, row, max_length, least))
        changes = [CHANGED] * any(side.changed for side in rendered)
        bos = tokenizer.bos_token_id
        twice = [TWO_BOS] if bos is not None and prompt_ids[:2] == [bos, bos] else []
        said = rendered[0].prompt.strip()
        again = [REPEATED] * (said != "" and all(s.response.lstrip().startswith(said) for s in rendered))
        out["odd"].append([*changes, *twice, *again, *[SPECIAL] * odd, *[CUT] * is_cut])
    return out


def _rendered(
    tokenizer: PreTrainedTokenizerBase, name: str, messages: Messages, sides: Sequence[str], options: Any
) -> list[Rendered]:
    try:
        answers = [decode_messages(side)[0] for side in sides]
        return with_one_prompt([render(tokenizer, messages, answer, options) for answer in answers])
    except UserError as error:
        raise UserError(f"{error} The row is {name!r}.") from None


def _tokenize_completions(rows: dict[str, list[Any]], **options: Any) -> dict[str, list[Any]]:
    out = _tokenize_rows(SFT, rows, **options) | {"id": rows["id"]}
    return {name: out[name] for name in _COMPLETIONS}


def _tokenize_pairs(
    rows: dict[str, list[Any]], augmentations: Augmentations | None, **options: Any
) -> dict[str, list[Any]]:
    tokenizer, max_length = options["tokenizer"], options["max_length"]
    views, by_rules = [], []
    names = ("id", "prompt", "chosen", "rejected", "chat", "tools", "chat_template_kwargs", "reason")
    columns = (rows[name] for name in (*names, "augmented_prompt"))
    for name, prompt, chosen, rejected, chat, tools, kwargs, reason, given in zip(*columns, strict=True):
        if reason is not None:
            views.append("")
            by_rules.append(False)
            continue
        view = (given or "") if augmentations is None else augmentations.of(name, prompt)
        blank = not (view.strip() and any(map(str.strip, texts_of(view, chat)[-1:])))
        by_rules.append(blank if augmentations is None else prompt in augmentations.by_rules)
        if blank:
            # The prompt itself counts as none, having the same tokens.
            view = _reworded(prompt, chat) if augmentations is None else prompt
        if chat:
            arguments, sides = template_options(tools, kwargs), (chosen, rejected)
            view = _rendered(tokenizer, name, decode_messages(view), sides, arguments)[0].prompt
        views.append(view)
    out = _tokenize_rows(PREFERENCES, rows, **options, views=views)
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
        return EMPTY[len(responses)]
    if len(responses) == 2 and responses[0] == responses[1]:
        return "equal responses"
    if not prompt:
        return "empty prompt"
    return "too long" if len(prompt) + max(least, *map(len, responses)) > max_length else None


@lru_cache(maxsize=1000)
def _reworded(prompt: str, chat: bool) -> str:
    if not chat:
        return rewording.reword(prompt)
    return with_texts(prompt, chat, [rewording.reword(text) for text in texts_of(prompt, chat)])


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    chat: Sequence[bool],
    tokenization: Tokenization = "default",
) -> list[list[int]]:
    """Return token ids of prompts; texts get BOS unless they begin with it, a rendered ``chat`` nothing.

    With OpenRLHF's rules no prompt gets BOS.
    """
    before: list[int] = []
    if tokenization != "openrlhf":
        plain, full = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
        before = full[: next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)]
    return [
        ids if is_chat or ids[: len(before)] == before else [*before, *ids]
        for ids, is_chat in zip(_encode(tokenizer, prompts), chat, strict=True)
    ]


def response_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    responses: list[str],
    tokenization: Tokenization = "default",
) -> list[list[int]]:
    """Return the token ids of responses after their prompts, each with one end token.

    The ids are those that follow the prompt's in prompt + response, so that a SentencePiece tokenizer adds no
    space, as in TRL. If a token spans the boundary, TRL cuts the prompt before it; here the response is
    encoded apart, so the prompt keeps the tokens of ``predict``. A response that ends in none of
    ``end_tokens`` gets EOS; of several, the chat template's is kept. OpenRLHF instead strips newlines from
    the end and adds a space and EOS, as text, where the response does not end in EOS.
    """
    ends = end_tokens(tokenizer)
    marks = tuple(tokenizer.convert_ids_to_tokens(ends))
    if tokenization == "openrlhf":
        eos, responses = tokenizer.eos_token, [text.rstrip("\n") for text in responses]
        responses = [text if text.endswith(eos) else f"{text} {eos}" for text in responses]
    else:
        # A newline after the end of a turn is not trained on.
        responses = [text.rstrip() if text.rstrip().endswith(marks) else text for text in responses]
    pairs = list(zip(prompts, responses, strict=True))
    prompt_ids = _encode(tokenizer, prompts)
    whole = _encode(tokenizer, [prompt + response for prompt, response in pairs])
    response_ids = [_following(*ids) for ids in zip(prompt_ids, whole, strict=True)]
    apart = [i for i, ids in enumerate(response_ids) if ids is None]
    for i, ids in zip(apart, _encode_apart(tokenizer, [responses[i] for i in apart]), strict=True):
        response_ids[i] = ids
    if tokenization == "openrlhf":
        return [ids for ids in response_ids if ids is not None]
    return [_with_one_end(ids, ends, tokenizer.eos_token_id) for ids in response_ids if ids is not None]


def _following(before: list[int], whole: list[int]) -> list[int] | None:
    return whole[len(before) :] if whole[: len(before)] == before else None


def _encode_apart(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Encode texts after a character that does not merge with them, so that no space is added."""
    encoded: dict[str, list[int]] = {}
    for anchor in ("\n", ".", "a", "0"):
        left = [text for text in dict.fromkeys(texts) if text not in encoded]
        [before] = _encode(tokenizer, [anchor])
        for text, ids in zip(left, _encode(tokenizer, [anchor + text for text in left]), strict=True):
            following = _following(before, ids)
            if following is not None:
                encoded[text] = following
    left = [text for text in dict.fromkeys(texts) if text not in encoded]
    encoded |= zip(left, _encode(tokenizer, left), strict=True)
    return [encoded[text] for text in texts]


def _with_one_end(ids: list[int], ends: list[int], eos: int) -> list[int]:
    length = len(ids)
    while length and ids[length - 1] in ends:
        length -= 1
    return [*ids[:length], next((end for end in ends if end in ids[length:]), eos)]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    # Many pairs share a prompt, and encoding takes most of the time.
    unique = list(dict.fromkeys(texts))
    # verbose=False: no warning about the model's length, since long pairs are dropped.
    encoded = tokenizer(unique, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids = dict(zip(unique, encoded["input_ids"], strict=True))
    return [ids[text] for text in texts]
