"""A model's tokenizer: loading or training it, and the tokens of prompts and responses."""

import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from lightning.pytorch.utilities import rank_zero_info
from peft import PeftConfig
from tokenizers import ByteLevelBPETokenizer, Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file, find_adapter_config_file

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import expanded
from pacmr_lightning.policy.chat_template import end_tokens
from pacmr_lightning.policy.hub_access import locate, pretrained

Tokenization = Literal["default", "openrlhf"]
"""Whose rules make rows to tokens: the project's, or those of OpenRLHF's datasets."""

LEAST = 3
"""Tokens that a prompt must leave of ``max_length``, by OpenRLHF's rules."""

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
SMALLEST = 256 + 3
"""All bytes and the special tokens, so that any text can be encoded."""


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Return a tokenizer from a folder or the Hub, an adapter's own or its base's; EOS pads if need be."""
    name = str(expanded(name))
    base = _base_of(locate(name))
    if base and not any(_holds(name, file) for file in ("tokenizer_config.json", "tokenizer.json")):
        rank_zero_info(f"The adapter {name} has no tokenizer; that of its base {base} is used.")
        return load_tokenizer(base)
    tokenizer = pretrained(AutoTokenizer, name, "tokenizer")
    if base:
        own = "tokenizer and chat template are used, not those"
        if tokenizer.chat_template is None and _holds(base, "tokenizer_config.json"):
            own = "tokenizer is used, with the chat template"
            tokenizer.chat_template = AutoTokenizer.from_pretrained(base).chat_template
        rank_zero_info(f"The adapter {name}'s own {own} of its base {base}.")
    if tokenizer.eos_token_id is None:
        raise UserError(f"The tokenizer {name!r} has no EOS token, which ends a response; set its eos_token.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that restores every text exactly, and adds BOS but never EOS."""
    if vocab_size < SMALLEST:
        raise UserError(
            f"vocab_size is {vocab_size}, but a byte-level tokenizer needs at least {SMALLEST} tokens."
        )
    special = [BOS, EOS, PAD]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=special
    )
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        # True removes the space before punctuation when decoding.
        clean_up_tokenization_spaces=False,
    )


def _base_of(place: str) -> str | None:
    try:
        there = find_adapter_config_file(place) is not None
        return PeftConfig.from_pretrained(place).base_model_name_or_path if there else None
    except (OSError, ValueError):  # loading the tokenizer reports the error
        return None


def _holds(place: str, file: str) -> bool:
    try:
        return cached_file(place, file, _raise_exceptions_for_missing_entries=False) is not None
    except OSError:
        return False


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    chat: Sequence[bool] | None = None,
    tokenization: Tokenization = "default",
) -> list[list[int]]:
    """Return token ids of prompts; texts get BOS unless they begin with it, a rendered ``chat`` nothing.

    With OpenRLHF's rules no prompt gets BOS.
    """
    before = [] if tokenization == "openrlhf" else _added_before(tokenizer)
    chat = [False] * len(prompts) if chat is None else chat
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
    found = [_following(*ids) for ids in zip(prompt_ids, whole, strict=True)]
    apart = [i for i, ids in enumerate(found) if ids is None]
    for i, ids in zip(apart, _encode_apart(tokenizer, [responses[i] for i in apart]), strict=True):
        found[i] = ids
    if tokenization == "openrlhf":
        return [ids for ids in found if ids is not None]
    return [_with_one_end(ids, ends, tokenizer.eos_token_id) for ids in found if ids is not None]


def _following(before: list[int], whole: list[int]) -> list[int] | None:
    return whole[len(before) :] if whole[: len(before)] == before else None


def _encode_apart(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Encode texts after a character that does not merge with them, so that no space is added."""
    found: dict[str, list[int]] = {}
    for anchor in ("\n", ".", "a", "0"):
        left = [text for text in dict.fromkeys(texts) if text not in found]
        [before] = _encode(tokenizer, [anchor])
        for text, ids in zip(left, _encode(tokenizer, [anchor + text for text in left]), strict=True):
            following = _following(before, ids)
            if following is not None:
                found[text] = following
    left = [text for text in dict.fromkeys(texts) if text not in found]
    found |= zip(left, _encode(tokenizer, left), strict=True)
    return [found[text] for text in texts]


def _with_one_end(ids: list[int], ends: list[int], eos: int) -> list[int]:
    length = len(ids)
    while length and ids[length - 1] in ends:
        length -= 1
    return [*ids[:length], next((end for end in ends if end in ids[length:]), eos)]


def _added_before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    plain, full = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
    start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    return full[:start]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    # Many pairs share a prompt, and encoding takes most of the time.
    unique = list(dict.fromkeys(texts))
    # verbose=False: no warning about the model's length, since long pairs are dropped.
    encoded = tokenizer(unique, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids = dict(zip(unique, encoded["input_ids"], strict=True))
    return [ids[text] for text in texts]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the tokenizer's saved files, the same in every process and after any use."""
    digest = hashlib.sha256()
    # Padding and truncation of an earlier call would be saved; a plain call resets them.
    tokenizer("", verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
