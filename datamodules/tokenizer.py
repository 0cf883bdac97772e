"""A model's tokenizer: how it is loaded, and what prompts and responses become under it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer from a folder or the Hub, with padding (EOS where it has no padding token of its own).

    Raises:
        UserError: there is no such folder or Hub repository, it holds no tokenizer, or the tokenizer has no
            EOS.
    """
    looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    path = Path(name).expanduser()
    if looks_like_a_path and not path.is_dir():
        raise UserError(
            f"tokenizer is {name!r}, but there is no such folder; give a model's folder or Hub id."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"tokenizer is {name!r}, but no tokenizer could be loaded from there ({reason}); "
            "give a model's folder or Hub id."
        ) from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"The tokenizer {name!r} has no EOS token, which ends a response; set its eos_token.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str], chat: Sequence[bool] | None = None
) -> list[list[int]]:
    """Token ids of prompts with the tokenizer's special tokens (BOS if it adds one), never a final EOS.

    Where ``chat`` is true the chat template wrote the prompt, special tokens and all: they are taken as they
    are.
    """
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    chat = [False] * len(prompts) if chat is None else chat
    encoded = iter(_encode(tokenizer, [p for p, c in zip(prompts, chat, strict=True) if not c], special=True))
    rendered = iter(_encode(tokenizer, [p for p, c in zip(prompts, chat, strict=True) if c], special=False))
    found = []
    for is_chat in chat:
        ids = next(rendered if is_chat else encoded)
        # Some tokenizers use one token as BOS and EOS: alone, it is the BOS.
        while not is_chat and ids and ids[-1] == eos and not (len(ids) == 1 and eos == bos):
            ids = ids[:-1]
        found.append(ids)
    return found


def response_tokens(
    tokenizer: PreTrainedTokenizerBase, responses: list[str], ended: Sequence[bool] | None = None
) -> list[list[int]]:
    """Token ids of responses: no BOS, exactly one EOS at the end, also where the text ends in EOS itself.

    Where ``ended`` is true a chat template ended the response, perhaps with another token than EOS: nothing
    is added.
    """
    eos = tokenizer.eos_token_id
    ended = [False] * len(responses) if ended is None else ended
    found = []
    for ids, is_ended in zip(_encode(tokenizer, responses, special=False), ended, strict=True):
        while ids and ids[-1] == eos:
            ids = ids[:-1]
            is_ended = False
        found.append(ids if is_ended else [*ids, eos])
    return found


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> list[list[int]]:
    if not texts:
        return []
    # Many pairs share a prompt (five of them in TL;DR), and encoding takes most of the time.
    unique = list(dict.fromkeys(texts))
    # verbose=False: the warning about the model's length would be wrong, for long pairs are dropped.
    encoded = tokenizer(unique, add_special_tokens=special, return_attention_mask=False, verbose=False)
    ids = dict(zip(unique, encoded["input_ids"], strict=True))
    return [ids[text] for text in texts]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the files that the tokenizer saves: the same in every process and after any use."""
    digest = hashlib.sha256()
    # Padding and truncation of an earlier call are part of what is saved; a call without them takes them
    # back.
    tokenizer("", verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
