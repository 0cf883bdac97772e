"""The base class of prompt rewriters, and rule-based rewriting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import rewording
from .augmented_prompts import AugmentedPrompt
from .structure import Part, cut, looks_like_frame, texts_of, with_texts

WORDLESS = "came back without words"
LIKE_FRAME = "would read as a turn or a header"


@dataclass(frozen=True)
class Rewriting:
    """The replacement of a piece, or the piece itself if it was kept."""

    text: str
    kept: str | None
    """Why the piece is unchanged; None if it changed."""
    stored: bool = False

    @classmethod
    def checked(cls, piece: str, text: str, problem: str | None, stored: bool = False) -> Rewriting:
        """Return the stripped replacement; the piece itself where there is a problem."""
        if problem is None and not any(map(str.isalpha, text)):
            problem = WORDLESS
        if problem is None and looks_like_frame(text) and not looks_like_frame(piece):
            problem = LIKE_FRAME
        return cls(text.strip() if problem is None else piece, problem, stored)


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

    method = "rules"

    @property
    def settings(self) -> dict[str, Any]:
        """The version of the rules."""
        return {"version": rewording.VERSION}

    def parts(self, text: str) -> list[Part]:
        """Return the whole text as one content; the rules handle the frame."""
        return [Part(text, True)]

    def rewrite(self, prompts: Sequence[Sequence[str]], answers: Path) -> dict[str, Rewriting]:
        """Apply the rules to every piece."""
        return {
            piece: Rewriting(rewording.reword(piece), kept=None) for pieces in prompts for piece in pieces
        }


def augment_prompts(
    prompts: Sequence[AugmentedPrompt], rewriter: Rewriter, answers: Path
) -> tuple[list[AugmentedPrompt], dict[str, Rewriting]]:
    """Return N augmented prompts, and the rewriting of each piece."""
    parts = [
        [rewriter.parts(text) for text in texts_of(prompt.prompt, prompt.chat)]
        for prompt in tqdm(prompts, desc="Cutting", unit="prompt", leave=False)
    ]
    pieces = [[part.text for text in texts for part in text if part.content] for texts in parts]
    found = rewriter.rewrite(pieces, answers)
    rows = []
    for prompt, texts, own in zip(prompts, parts, pieces, strict=True):
        new = ["".join(found[p.text].text if p.content else p.text for p in text) for text in texts]
        augmented = with_texts(prompt.prompt, prompt.chat, new)
        kept = Counter(reason for piece in own if (reason := found[piece].kept) is not None)
        rows.append(replace(prompt, augmented=augmented, pieces=len(own), kept=kept))
    return rows, found
