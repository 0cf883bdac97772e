"""Judges that compare two responses to a prompt, each pair in both orders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..embedded_world import World
from ..errors import UserError
from .answer_store import AnswerStore
from .conversation import Messages
from .endpoint import Answer, Endpoint
from .judge_prompts import Task, judge_messages, parse_verdict

Preference = Literal["first", "second", "none"]


@dataclass(frozen=True)
class Comparison:
    """Two responses to one prompt."""

    prompt: str | Messages
    """A text, an HH transcript that ends in ``Assistant:``, or chat messages."""
    first: str
    second: str


@dataclass(frozen=True)
class Opinion:
    """A judge's answer about a pair in one order."""

    preferred: Preference
    """By its place in the ``Comparison``, not that at which the judge saw it; ``none`` for neither."""
    answer: str | None
    """The judge's own words, without its reasoning; None where there are none."""
    problem: str | None = None
    """Why ``preferred`` is ``none``, where that is no opinion of the judge."""
    prompt_tokens: int = 0
    """Paid for, now or when the answer came into the store; 0 for local models."""
    completion_tokens: int = 0
    cached: bool = False
    """True if it comes from the store."""


@dataclass(frozen=True)
class Verdict:
    """A judge's opinions of a pair in both orders."""

    orders: tuple[Opinion, Opinion]
    """First with the comparison's first response as A, then with its second one as A."""

    @property
    def preferred(self) -> Preference:
        """The response that both orders name; ``none`` where they disagree, or one of them names none."""
        one, other = (opinion.preferred for opinion in self.orders)
        return one if one == other else "none"

    def told(self, names: Mapping[Preference, str]) -> list[dict[str, str | None]]:
        """Return both orders for a file, with other names for the preferences."""
        return [
            {"verdict": names[one.preferred], "answer": one.answer, "problem": one.problem}
            for one in self.orders
        ]

    @property
    def inconsistent(self) -> bool:
        """True if both orders name a response, and not the same one."""
        return {opinion.preferred for opinion in self.orders} == {"first", "second"}


def by_scores(first: float, second: float, cached: bool = False) -> Verdict:
    """Return the verdict that the response with the higher score is better; equal scores prefer neither."""
    better: Preference = "first" if first > second else "second" if second > first else "none"
    return Verdict((Opinion(better, f"scores {first:.6g} and {second:.6g}", cached=cached),) * 2)


class PairJudge(ABC):
    """A judge of which of two responses is better."""

    name: str
    """Of the judge, in messages and files."""
    settings: dict[str, Any]
    """All that its verdicts depend on, JSON-serialisable."""

    @abstractmethod
    def compare(self, items: Sequence[Comparison], store: AnswerStore) -> list[Verdict]:
        """Return verdicts on N pairs, in their order.

        Args:
            items: N pairs.
            store: of the judge's answers; what is in there is not asked again.

        Raises:
            UserError: the judge cannot work at all. Its answers until then are kept.
        """


class EndpointJudge(PairJudge):
    """A chat model with the paper's judge prompts; it must name the same response in both orders.

    Args:
        task: ``summary`` or ``dialogue``, which decides the prompts; also by the names of the paper's data,
            ``tldr`` and ``hh``.
        endpoint: options of ``Endpoint``; the defaults are the paper's judge.

    Raises:
        UserError: an option of the endpoint is out of range.
    """

    def __init__(self, task: Literal["summary", "dialogue", "tldr", "hh"] = "dialogue", **endpoint: Any):
        self.task: Task = "summary" if task == "tldr" else "dialogue" if task == "hh" else task
        self.endpoint = Endpoint(**endpoint)
        self.name = self.endpoint.model
        self.settings = {"task": self.task, **self.endpoint.settings}

    def compare(self, items: Sequence[Comparison], store: AnswerStore) -> list[Verdict]:
        """Ask 2 N questions, except those whose answers are in the store."""
        asked = [
            judge_messages(self.task, item.prompt, *shown)
            for item in items
            for shown in ((item.first, item.second), (item.second, item.first))
        ]
        answers = self.endpoint.ask(asked, store, f"Judging with {self.name}")
        return [
            Verdict((self._opinion(straight, "first", "second"), self._opinion(exchanged, "second", "first")))
            for straight, exchanged in zip(answers[::2], answers[1::2], strict=True)
        ]

    def _opinion(self, answer: Answer, a: Preference, b: Preference) -> Opinion:
        """Return the opinion in an answer, where ``a`` was called A and ``b`` B."""
        costs = (answer.prompt_tokens, answer.completion_tokens, answer.cached)
        if answer.text is None:
            return Opinion("none", None, answer.problem, *costs)
        letter = parse_verdict(self.task, answer.text)
        if letter is None:
            limit = self.endpoint.max_tokens
            cut = f"the answer was cut before a verdict; raise max_tokens, now {limit}"
            problem = cut if answer.is_cut(limit) else "the answer does not end in a verdict"
            return Opinion("none", answer.text, problem, *costs)
        return Opinion(a if letter == "A" else b, answer.text, None, *costs)


class GoldJudge(PairJudge):
    """The embedded world's gold reward as a judge; equal rewards prefer neither.

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
        """Score 2 N responses.

        Raises:
            UserError: a prompt is not of the embedded world.
        """
        verdicts = []
        for item in items:
            if not isinstance(item.prompt, str):
                raise UserError(
                    f"The prompt {str(item.prompt)[:80]} is a chat, but the embedded world has texts only; "
                    "name another judge."
                )
            first, second = (self.world.gold_reward(item.prompt, text) for text in (item.first, item.second))
            verdicts.append(by_scores(first, second))
        return verdicts
