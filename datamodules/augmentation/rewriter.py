"""Rewriting of prompts: the base class, rule-based rewriting, and augmentation of pairs with a rewriter."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError

from .. import rewording
from ..sampling import stratified_sample
from ..tokenization import tokenize_pairs
from .augmented_prompts import RULES, Augmentations, AugmentedPrompt, training_prompts
from .structure import Part, cut, looks_like_frame, texts_of, with_texts

UNCHANGED = "came back unchanged"
WORDLESS = "came back without words"
LIKE_FRAME = "would read as a turn or a header"
_THRICE = re.compile(r"(.+?)\1\1", re.DOTALL)


@dataclass(frozen=True)
class Rewriting:
    """The replacement of a piece, or the piece itself if it was kept."""

    text: str
    kept: str | None
    """Why the piece is unchanged; None if it changed."""

    @classmethod
    def checked(cls, piece: str, text: str, kept: str | None) -> Rewriting:
        """Return the stripped replacement; the piece itself where there is a reason to keep it."""
        if kept is None and text.strip() == piece.strip():
            kept = UNCHANGED
        if kept is None and not any(map(str.isalpha, text)):
            kept = WORDLESS
        if kept is None and looks_like_frame(text) and not looks_like_frame(piece):
            kept = LIKE_FRAME
        return cls(text.strip() if kept is None else piece, kept)


def loops(text: str, source: str) -> bool:
    """Return true if a phrase of any length follows itself more often than in the ``source`` of the text.

    Six times are too many, or three times if they have 24 characters or more, wherever the phrase stands. But
    up to twice as many as in the source are honest: "ha ha ha", lists and code have repetitions of their own.
    Digits of a number, and signs alone, do not count.
    """
    times = max((n for n, length in _repetitions(text) if n >= 6 or n * length >= 24), default=0)
    return times > 0 and times > 2 * max((n for n, _ in _repetitions(source)), default=1)


def _repetitions(text: str) -> list[tuple[int, int]]:
    """Return how often, three times or more, and of how many characters phrases follow themselves."""
    text = f"{text.strip()} "  # so that the last one is whole
    if not _THRICE.search(text):
        return []
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    repetitions = []
    for length in range(1, len(text) // 3 + 1):
        # Runs of characters that equal those one phrase later lie between those that do not.
        ends = np.array([-1, *np.flatnonzero(codes[:-length] != codes[length:]), len(text) - length])
        same = np.diff(ends) - 1
        start = int(ends[same.argmax()]) + 1
        phrase, times = text[start : start + length], 1 + int(same.max()) // length
        if times >= 3 and any(map(str.isalnum, phrase)) and not phrase.isdigit():
            repetitions.append((times, length))
    return repetitions


class Rewriter(ABC):
    """Base of classes that augment prompts by rewriting their contents."""

    method: str

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything that changes a result, JSON-serialisable."""

    def parts(self, text: str) -> list[Part]:
        """Split a text into frame and contents; contents are rewritten one by one."""
        return cut(text)

    @abstractmethod
    def rewrite(self, prompts: Sequence[Sequence[str]], answers: Path) -> dict[str, Rewriting]:
        """Return the rewriting of each piece.

        Args:
            prompts: N lists of pieces, the contents of ``parts``.
            answers: file for intermediate results, such as an ``AnswerStore``, so that a killed run resumes.
        """


class Rules(Rewriter):
    """Rule-based rewriting (``rewording.reword``) of whole prompts: no model, only surface changes."""

    method = RULES

    @property
    def settings(self) -> dict[str, Any]:
        """The version of the rules."""
        return {"version": rewording.VERSION}

    def parts(self, text: str) -> list[Part]:
        """Return the whole text as one content; the rules handle the frame."""
        return [Part(text, True)]

    def rewrite(self, prompts: Sequence[Sequence[str]], answers: Path) -> dict[str, Rewriting]:
        """Apply the rules to every piece."""
        new = {piece: rewording.reword(piece) for pieces in prompts for piece in pieces}
        return {
            piece: Rewriting(text, "no rule applies" if text == piece else None)
            for piece, text in new.items()
        }


def augment_prompts(
    prompts: Sequence[AugmentedPrompt], rewriter: Rewriter, answers: Path
) -> list[AugmentedPrompt]:
    """Return N augmented prompts."""
    parts = [
        [rewriter.parts(text) for text in texts_of(prompt.prompt, prompt.chat)]
        for prompt in tqdm(prompts, desc="Cutting", unit="prompt", leave=False)
    ]
    pieces = [[part.text for text in texts for part in text if part.content] for texts in parts]
    rewritten = rewriter.rewrite(pieces, answers)
    rows = []
    for prompt, texts, own in zip(prompts, parts, pieces, strict=True):
        new = ["".join(rewritten[p.text].text if p.content else p.text for p in text) for text in texts]
        augmented = with_texts(prompt.prompt, prompt.chat, new)
        kept = Counter(reason for piece in own if (reason := rewritten[piece].kept) is not None)
        rows.append(replace(prompt, augmented=augmented, pieces=len(own), kept=kept))
    return rows


def augment_pairs(
    rows: Dataset,
    rewriter: Rewriter,
    answers: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    n: int,
    seed: int,
) -> list[AugmentedPrompt]:
    """Return the augmented prompts of exactly ``n`` pairs.

    The pairs are a stratified sample of the M rows that training keeps at ``max_length`` tokens and whose
    augmented prompt differs and fits too.

    Raises:
        UserError: there are fewer such pairs.
    """
    kept, _ = tokenize_pairs(rows, tokenizer, max_length, Augmentations({}))
    rows = rows.select([*map({name: i for i, name in enumerate(rows["id"][:])}.get, kept["id"][:])])
    # Label noise uses the hash of id and seed alone; the sample must be independent of it.
    names, categories = [f"augment {name}" for name in rows["id"][:]], rows["category"][:]
    done: dict[str, AugmentedPrompt] = {}
    size, usable = n, list[int]()
    if n > len(names):
        raise UserError(
            f"n is {n}, but {len(names)} training pairs fit into max_length {max_length}; lower n, or raise "
            "max_length."
        )
    while len(usable) < n:
        places = stratified_sample(names, categories, size, seed)
        taken = rows.select(places)
        new = [prompt for prompt in training_prompts(taken) if prompt.prompt not in done]
        if new:
            done |= {prompt.prompt: prompt for prompt in augment_prompts(new, rewriter, answers)}
        views = Augmentations({prompt.prompt: prompt.augmented for prompt in done.values()})
        fits = tokenize_pairs(taken, tokenizer, max_length, views)[0]["has_augmented_prompt"][:]
        usable = [place for place, fit in zip(places, fits, strict=True) if fit]
        if size == len(names) and len(usable) < n:
            raise UserError(
                f"n is {n}, but {len(usable)} of {len(names)} training pairs have an augmented prompt that "
                f"differs and fits into max_length {max_length}; lower n, or use another rewriter."
            )
        # As many more as the share of usable pairs suggests.
        size = min(len(names), size + -(-(n - len(usable)) * size // max(1, len(usable))))
    chosen = stratified_sample([names[i] for i in usable], [categories[i] for i in usable], n, seed)
    sample = training_prompts(rows.select([usable[i] for i in chosen]))
    return [replace(done[prompt.prompt], ids=prompt.ids) for prompt in sample]
