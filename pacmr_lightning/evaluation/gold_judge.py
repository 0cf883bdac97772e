"""The embedded world as a judge: its gold reward is the truth about its prompts."""

from __future__ import annotations

from collections.abc import Sequence

from ..embedded_world import World
from ..errors import UserError
from .answer_store import AnswerStore
from .judging import Comparison, PairJudge, Verdict, by_scores


class GoldJudge(PairJudge):
    """Prefers the response with the higher gold reward; equal rewards prefer neither.

    No order is involved, so both opinions of a verdict are the same. Nothing is stored, for it costs nothing.

    Args:
        seed: of the embedded world (``--data.source.seed`` of the runs).

    Raises:
        UserError: the seed is negative.
    """

    def __init__(self, seed: int = 0):
        self.world = World(seed)
        self.name = "gold reward"
        self.settings = {"world": seed}

    def compare(self, items: Sequence[Comparison], store: AnswerStore) -> list[Verdict]:
        """Scores 2 N responses.

        Raises:
            UserError: a prompt is not of the embedded world.
        """
        return [self._verdict(item) for item in items]

    def _verdict(self, item: Comparison) -> Verdict:
        if not isinstance(item.prompt, str):
            raise UserError(
                f"The prompt {str(item.prompt)[:80]} is a chat, but the embedded world has texts only; name "
                "another judge."
            )
        first, second = (self.world.gold_reward(item.prompt, text) for text in (item.first, item.second))
        opinion = by_scores(first, second)
        return Verdict((opinion, opinion))
