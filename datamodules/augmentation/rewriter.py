"""The base of rewriters, which word prompts differently, and the rules that need no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import rewording
from .files import AugmentedPrompt
from .structure import Part, cut, looks_like_frame, texts_of, with_texts

WORDLESS = "came back without words"
LIKE_FRAME = "would read as a turn or a header"


@dataclass(frozen=True)
class Rewriting:
    """The text that takes the place of a piece."""

    text: str
    """The piece itself where it was kept."""
    kept: str | None
    """Why it was kept as it is; None where it was not."""
    stored: bool = False
    """True if it was in the store from an earlier run."""

    @classmethod
    def checked(cls, piece: str, text: str, problem: str | None, stored: bool = False) -> Rewriting:
        """Return a piece in other words, stripped; the piece itself where there is a problem."""
        if problem is None and not any(map(str.isalpha, text)):
            problem = WORDLESS
        if problem is None and looks_like_frame(text) and not looks_like_frame(piece):
            problem = LIKE_FRAME
        return cls(text.strip() if problem is None else piece, problem, stored)


class Rewriter(ABC):
    """Rewrites the contents of prompts in other words."""

    method: str
    """Its name in files and reports."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything that changes a result, JSON-serialisable."""

    def parts(self, text: str) -> list[Part]:
        """Return a text in frame and contents, which are worded differently one by one."""
        return cut(text)

    @abstractmethod
    def rewrite(self, prompts: Sequence[Sequence[str]], answers: Path) -> dict[str, Rewriting]:
        """Return what becomes of each piece.

        Args:
            prompts: N lists of pieces, the contents of ``parts``.
            answers: file for results as they come, so that a killed run goes on; an ``AnswerStore`` where it
                takes long.
        """


class Rules(Rewriter):
    """Rule-based rewordings (``rewording.reword``): no model, no network, but only the surface changes.

    Headers of TL;DR posts change places; whole prompts are reworded at once.
    """

    method = "rules"

    @property
    def settings(self) -> dict[str, Any]:
        """The version of the rules."""
        return {"version": rewording.VERSION}

    def parts(self, text: str) -> list[Part]:
        """Return the whole text, whose frame the rules know themselves."""
        return [Part(text, True)]

    def rewrite(self, prompts: Sequence[Sequence[str]], answers: Path) -> dict[str, Rewriting]:
        """Return every piece under the rules."""
        return {
            piece: Rewriting(rewording.reword(piece), kept=None) for pieces in prompts for piece in pieces
        }


def augment_prompts(
    prompts: Sequence[AugmentedPrompt], rewriter: Rewriter, answers: Path
) -> tuple[list[AugmentedPrompt], dict[str, Rewriting]]:
    """Return N prompts in other words, and what became of each piece (see ``Rewriter.rewrite``)."""
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
