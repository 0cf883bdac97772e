"""What words prompts differently: the base class, and the rules that need no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import rewording
from .structure import Part, cut, looks_like_frame

WORDLESS = "came back without words"
LIKE_FRAME = "would read as a turn or a header"


@dataclass(frozen=True)
class Rewriting:
    """What stands in the place of a piece of text."""

    text: str
    """The piece itself where it was kept."""
    kept: str | None
    """Why it was kept as it is; None where it was not."""
    stored: bool = False
    """Whether it was in the store from an earlier run."""


def rewriting(piece: str, text: str, problem: str | None, stored: bool = False) -> Rewriting:
    """The piece in other words, or the piece itself where there is a problem.

    Args:
        piece: a content, or a part of one.
        text: the same in other words; taken without whitespace at both ends.
        problem: why ``text`` is of no use.
        stored: whether it comes from an earlier run.
    """
    if problem is None and not any(map(str.isalpha, text)):
        problem = WORDLESS
    if problem is None and looks_like_frame(text) and not looks_like_frame(piece):
        problem = LIKE_FRAME
    return Rewriting(text.strip() if problem is None else piece, problem, stored)


class Rewriter(ABC):
    """Words the contents of prompts differently."""

    method: str
    """What files and reports call it."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything that changes a result, JSON-serialisable."""

    def parts(self, text: str) -> list[Part]:
        """A text in frame and contents, which are worded differently one by one."""
        return cut(text)

    @abstractmethod
    def rewrite(self, prompts: Sequence[Sequence[str]], answers: Path) -> dict[str, Rewriting]:
        """Every piece in other words.

        Args:
            prompts: N lists of pieces, the contents of ``parts``.
            answers: file for results as they come, so that a killed run goes on; an ``AnswerStore`` where it
                takes long.

        Returns:
            What becomes of each piece.
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
        """The whole text, whose frame the rules know themselves."""
        return [Part(text, True)]

    def rewrite(self, prompts: Sequence[Sequence[str]], answers: Path) -> dict[str, Rewriting]:
        """Every piece under the rules."""
        return {
            piece: Rewriting(rewording.reword(piece), kept=None) for pieces in prompts for piece in pieces
        }
