"""Judges that say which of two responses to a prompt is better, each pair looked at in both orders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .answer_store import AnswerStore
from .chat_request import Answer
from .conversation import Messages
from .endpoint import Endpoint
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
    """What a judge said of a pair in one order.

    Attributes:
        preferred: the response that it names, by its place in the ``Comparison`` and not by the place at
            which the judge saw it; ``none`` where it names none.
        answer: the judge's own words, without its reasoning; None where there are none.
        problem: why ``preferred`` is ``none``, where that is no opinion of the judge.
        prompt_tokens: that were paid for, now or when the answer came into the store; 0 for local models.
        completion_tokens: likewise.
        cached: it comes from the store.
    """

    preferred: Preference
    answer: str | None
    problem: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False


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

    @property
    def inconsistent(self) -> bool:
        """Both orders name a response, and not the same one."""
        return {opinion.preferred for opinion in self.orders} == {"first", "second"}


def by_scores(first: float, second: float, cached: bool = False) -> Opinion:
    """The opinion that the response with the higher score is the better one; equal scores prefer neither."""
    better: Preference = "none"
    if first != second:
        better = "first" if first > second else "second"
    return Opinion(better, f"scores {first:.6g} and {second:.6g}", cached=cached)


class PairJudge(ABC):
    """Says which of two responses is better."""

    name: str
    """What messages and files call the judge."""
    settings: dict[str, Any]
    """What its verdicts depend on, JSON-serialisable."""

    @abstractmethod
    def compare(self, items: Sequence[Comparison], store: AnswerStore) -> list[Verdict]:
        """Verdicts on N pairs, in their order.

        Args:
            items: N pairs.
            store: of what the judge said; what is in there is not asked again.

        Raises:
            UserError: the judge cannot work at all. What it said before is kept.
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
        """Asks 2 N questions, except those whose answers are in the store."""
        asked = []
        for item in items:
            asked.append(judge_messages(self.task, item.prompt, item.first, item.second))
            asked.append(judge_messages(self.task, item.prompt, item.second, item.first))
        answers = self.endpoint.ask(asked, store, f"Judging with {self.name}")
        return [
            Verdict((self._opinion(straight, "first", "second"), self._opinion(exchanged, "second", "first")))
            for straight, exchanged in zip(answers[::2], answers[1::2], strict=True)
        ]

    def _opinion(self, answer: Answer, a: Preference, b: Preference) -> Opinion:
        """The opinion in an answer, where ``a`` was called A and ``b`` B."""
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
