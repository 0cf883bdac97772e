"""Turns rows into token ids, and drops the pairs that cannot be trained on; never cuts one.

The token cache (datasets' own) depends on the rows, the tokenizer and ``max_length`` only, not on the noise:
labels are flipped when batches are made.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from pathlib import Path

from datasets import Dataset, Features, List, Value
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import UserError

from . import rewording
from .prompts import DIFFERENT_PROMPTS, NO_COMMON_PROMPT, split_prompt

_LAYOUT = 1
"""Part of the cache's key; raised whenever the same rows are turned into other tokens."""

REASONS = (
    "too long",
    "empty response",
    "equal responses",
    DIFFERENT_PROMPTS,
    NO_COMMON_PROMPT,
    "empty prompt",
)
"""Why a pair may be dropped."""
NO_SECOND_VIEW = "no second view"
"""Count of kept pairs whose reworded prompt is missing, too long or the same tokens."""

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
        "drop": Value("string"),
    }
)


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


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[list[int]]:
    """Token ids of prompts with the tokenizer's special tokens (BOS if it adds one), never a final EOS."""
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    found = []
    for ids in _encode(tokenizer, prompts, special=True):
        # Some tokenizers use one token as BOS and EOS: alone, it is the BOS.
        while ids and ids[-1] == eos and not (len(ids) == 1 and eos == bos):
            ids = ids[:-1]
        found.append(ids)
    return found


def response_tokens(tokenizer: PreTrainedTokenizerBase, responses: list[str]) -> list[list[int]]:
    """Token ids of responses: no BOS, exactly one EOS at the end, also where the text ends in EOS itself."""
    eos = tokenizer.eos_token_id
    found = []
    for ids in _encode(tokenizer, responses, special=False):
        while ids and ids[-1] == eos:
            ids = ids[:-1]
        found.append([*ids, eos])
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


def tokenize_pairs(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[Dataset, dict[str, int]]:
    """Token ids of the pairs that can be trained on.

    Args:
        rows: as ``read_preferences`` makes them.
        tokenizer: has EOS.
        max_length: tokens; a pair whose prompt and longer response (EOS included) exceed it is dropped.

    Returns:
        The kept rows, with ``id``, ``prompt`` (text), ``prompt_ids``, ``chosen_ids``, ``rejected_ids`` (each
        response ends in one EOS), ``augmented_ids`` (the second view's prompt: the row's
        ``augmented_prompt``, else a rule-based rewording; empty where that is the same tokens or too long),
        ``second_view`` (whether there is one), ``flipped`` (1, 0, or -1 where the row says nothing),
        ``category`` and ``eta`` (None where unknown; both speak of the label as found in the file); and how
        many rows there were, were kept, were dropped for each of ``REASONS``, and have no second view.

    Raises:
        UserError: all rows were dropped.
    """
    key = f"{_LAYOUT}:{rewording.VERSION}:{rows._fingerprint}:{tokenizer_digest(tokenizer)}:{max_length}"
    tokenized = rows.map(
        _tokenize_batch,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length},
        remove_columns=rows.column_names,
        features=FEATURES,
        # Given because a pickled tokenizer changes with use and between processes.
        new_fingerprint=hashlib.sha256(key.encode()).hexdigest()[:16],
        desc="Tokenizing",
    )
    drops = Counter(tokenized["drop"])
    kept = [i for i, reason in enumerate(tokenized["drop"]) if reason is None]
    counts = {"rows": len(tokenized), "kept": len(kept)} | {r: drops[r] for r in REASONS if drops[r]}
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items() if reason in REASONS)
        raise UserError(
            f"None of the {len(tokenized)} pairs can be used at max_length {max_length} ({reasons})."
        )
    tokenized = tokenized.select(kept, keep_in_memory=True).remove_columns("drop")
    counts[NO_SECOND_VIEW] = sum(not view for view in tokenized["second_view"])
    return tokenized, counts


def _tokenize_batch(
    rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, list]:
    """What ``Dataset.map`` calls: columns in, columns out."""
    sides = zip(rows["prompt"], rows["chosen"], rows["rejected"], strict=True)
    texts = [_texts(*side) for side in sides]
    prompts = [prompt for prompt, *_ in texts]
    views = {prompt: rewording.reword(prompt) for prompt in set(prompts)}
    reworded = [
        given or views[prompt] for given, prompt in zip(rows["augmented_prompt"], prompts, strict=True)
    ]
    out = {
        "id": rows["id"],
        "prompt": prompts,
        "prompt_ids": prompt_tokens(tokenizer, prompts),
        "chosen_ids": response_tokens(tokenizer, [chosen for _, chosen, _, _ in texts]),
        "rejected_ids": response_tokens(tokenizer, [rejected for _, _, rejected, _ in texts]),
        "augmented_ids": prompt_tokens(tokenizer, reworded),
        "second_view": [],
        "flipped": [UNKNOWN if f is None else int(f) for f in rows["flipped"]],
        "category": rows["category"],
        "eta": rows["eta"],
        "drop": [],
    }
    for i, (_, chosen_text, rejected_text, reason) in enumerate(texts):
        prompt, chosen, rejected = (out[name][i] for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
        longer = max(len(chosen), len(rejected))
        # One token is EOS alone: the tokenizer made nothing of the text.
        if reason is None and not (
            chosen_text.strip() and rejected_text.strip() and min(len(chosen), len(rejected)) > 1
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


def _texts(prompt: str | None, chosen: str, rejected: str) -> tuple[str, str, str, str | None]:
    """Prompt, chosen, rejected, and why they cannot be had."""
    if prompt is not None:
        return prompt, chosen, rejected, None
    split = split_prompt(chosen, rejected)
    return split.prompt, split.chosen, split.rejected, split.reason


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
