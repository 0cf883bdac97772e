"""Judges that compare two responses to a prompt, each pair in both orders, and what they cost."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..embedded_world import World
from ..errors import UserError, check_at_least, check_choice
from .answer_store import AnswerStore
from .chat_completion import NO_TOKENS, Tokens
from .conversation import Messages, message_text
from .endpoint import Answer, Endpoint
from .judge_prompts import Task, judge_messages, parse_verdict

Preference = Literal["first", "second", "none"]
Prices = tuple[float | None, float | None]
"""Price of a million tokens of prompts and of answers, in any currency; both or none."""
CHARACTERS = 4
"""Characters of a token, of English text; for estimates only."""


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
    """By the place in the ``Comparison``, not the order shown; ``none`` for neither."""
    answer: str | None
    problem: str | None = None
    billed: Tokens = NO_TOKENS
    """Tokens of all requests for it, in this and earlier calls; see ``endpoint.Answer``."""
    now: Tokens = NO_TOKENS


@dataclass(frozen=True)
class Verdict:
    """A judge's opinions of a pair in both orders."""

    orders: tuple[Opinion, Opinion]
    """With the comparison's first response as A, then with its second one as A."""

    @property
    def preferred(self) -> Preference:
        """The response named in both orders, else ``none``."""
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
        """True if the two orders name different responses."""
        return {opinion.preferred for opinion in self.orders} == {"first", "second"}


def without_verdict(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Yield how many requests failed and how many answers hold no verdict, with the most frequent problem."""
    opinions = [opinion for verdict in verdicts for opinion in verdict.orders if opinion.problem]
    failed = Counter(opinion.problem for opinion in opinions if opinion.answer is None)
    invalid = Counter(opinion.problem for opinion in opinions if opinion.answer is not None)
    if failed:
        most = failed.most_common(1)[0][0]
        yield f"{failed.total()} requests failed (mostly: {most}); the same command repeats them."
    if invalid:
        yield f"invalid answers: {invalid.total()} (mostly: {invalid.most_common(1)[0][0]})."


def tokens_of(verdicts: Iterable[Verdict]) -> tuple[Tokens, Tokens]:
    """Return what verdicts cost, in all calls and in this one."""
    opinions = [opinion for verdict in verdicts for opinion in verdict.orders]
    return sum((one.billed for one in opinions), NO_TOKENS), sum((one.now for one in opinions), NO_TOKENS)


def by_scores(first: float, second: float) -> Verdict:
    """Return the verdict for the response with the higher score; equal scores prefer neither."""
    better: Preference = "first" if first > second else "second" if second > first else "none"
    return Verdict((Opinion(better, f"scores {first:.6g} and {second:.6g}"),) * 2)


class PairJudge(ABC):
    """Base of judges that decide which of two responses is better."""

    name: str
    settings: dict[str, Any]
    """All that its verdicts depend on, JSON-serialisable."""

    @abstractmethod
    def compare(self, items: Sequence[Comparison], store: AnswerStore) -> list[Verdict]:
        """Return verdicts on N pairs in order, reusing stored answers; raise UserError if the judge fails."""

    def check(self) -> None:
        """Raise a UserError if the judge cannot be used, before hours of work that end in ``compare``."""

    def questions(self, items: Sequence[Comparison], store: AnswerStore) -> list[Messages]:
        """Return what ``compare`` would send to a server that bills it; nothing by default."""
        return []


def check_any_verdict(judge: PairJudge, verdicts: Sequence[Verdict]) -> None:
    """Raise a UserError if none of a judge's answers holds a verdict."""
    opinions = [opinion for verdict in verdicts for opinion in verdict.orders]
    if opinions and all(opinion.problem is not None for opinion in opinions):
        (problem, _), *_ = Counter(opinion.problem for opinion in opinions).most_common()
        answer = next((f": {opinion.answer.strip()[:200]!r}" for opinion in opinions if opinion.answer), "")
        raise UserError(
            f"The judge {judge.name} gave no verdict on any of {len(verdicts)} pairs (mostly: {problem})"
            f"{answer}; name another judge, or change its options."
        )


def price(prompt: float, completion: float, prices: Prices) -> float | None:
    """Return the price of tokens; None without prices."""
    of_prompt, of_completion = prices
    if of_prompt is None or of_completion is None:
        return None
    return (prompt * of_prompt + completion * of_completion) / 1_000_000


def check_prices(prompt_price: float | None, completion_price: float | None, place: str = "") -> None:
    """Raise a UserError for prices below 0, or for one without the other; it begins with ``place``."""
    check_at_least(0, **{f"{place}prompt_price": prompt_price, f"{place}completion_price": completion_price})
    if (prompt_price is None) != (completion_price is None):
        raise UserError(
            f"{place}prompt_price is {prompt_price} and completion_price is {completion_price}; give both or "
            "none."
        )


def cost_before(judge: PairJudge, questions: Sequence[Messages], prices: Prices) -> str:
    """Return number, tokens and price of questions that a paid judge will be sent, in words.

    Tokens of prompts are estimated from characters; those of answers are the most that are allowed.
    """
    tokens = sum(len(message_text(message)) for messages in questions for message in messages) / CHARACTERS
    limit = judge.settings.get("max_tokens")
    words = f"{len(questions):,} calls, about {tokens:,.0f} tokens in"
    words += "" if limit is None else f", at most {len(questions) * limit:,} out"
    if (cost := price(tokens, len(questions) * (limit or 0), prices)) is not None:
        words += f", cost about {cost:,.2f}" + (" and the answers'" if limit is None else "")
    return words


def check_distinct(judges: Sequence[PairJudge]) -> None:
    """Raise UserError if two judges have the same settings, and so the same verdicts."""
    for i, judge in enumerate(judges):
        if judge.settings in [other.settings for other in judges[:i]]:
            raise UserError(f"judges holds {judge.name} twice, with the same verdicts; name another model.")


class EndpointJudge(PairJudge):
    """A chat model with the judge prompts of Qu et al.; it must name the same response in both orders.

    Args:
        task: ``summary`` or ``dialogue``, which decides the prompts; or ``tldr`` and ``hh``, the data of Qu
            et al.
        endpoint: options of ``Endpoint``; the defaults are those of Qu et al.
    """

    def __init__(self, task: Literal["summary", "dialogue", "tldr", "hh"] = "dialogue", **endpoint: Any):
        check_choice(Literal[Task, "tldr", "hh"], task=task)
        self.task: Task = "summary" if task == "tldr" else "dialogue" if task == "hh" else task
        self.endpoint = Endpoint(**endpoint)
        self.name = self.endpoint.model
        self.settings = {"task": self.task, **self.endpoint.settings}

    def check(self) -> None:
        """Ask one short question, which finds a wrong key, address, model or option."""
        short = Comparison("It rained all day, so we stayed in.", "Rain kept us in.", "It was sunny.")
        with AnswerStore(":memory:") as forgotten:
            self.endpoint.ask(self._conversations([short])[:1], forgotten, f"Reaching {self.name}")

    def questions(self, items: Sequence[Comparison], store: AnswerStore) -> list[Messages]:
        """Return at most 2 N conversations, those whose answers are not in the store."""
        return self.endpoint.unanswered(self._conversations(items), store)

    def compare(self, items: Sequence[Comparison], store: AnswerStore) -> list[Verdict]:
        """Send 2 N questions, except those whose answers are in the store."""
        answers = self.endpoint.ask(self._conversations(items), store, f"Judging with {self.name}")
        return [
            Verdict((self._opinion(straight, "first", "second"), self._opinion(exchanged, "second", "first")))
            for straight, exchanged in zip(answers[::2], answers[1::2], strict=True)
        ]

    def _conversations(self, items: Sequence[Comparison]) -> list[Messages]:
        return [
            judge_messages(self.task, item.prompt, *shown)
            for item in items
            for shown in ((item.first, item.second), (item.second, item.first))
        ]

    def _opinion(self, answer: Answer, a: Preference, b: Preference) -> Opinion:
        costs = (answer.billed, answer.now)
        if answer.text is None:
            return Opinion("none", None, answer.problem, *costs)
        letter = parse_verdict(self.task, answer.text)
        if letter is None:
            limit = self.endpoint.max_tokens
            cut = f"the answer was cut before a verdict; raise max_tokens, now {limit}"
            problem = cut if answer.cut else "the answer does not end in a verdict"
            return Opinion("none", answer.text, problem, *costs)
        return Opinion(a if letter == "A" else b, answer.text, None, *costs)


class GoldJudge(PairJudge):
    """The gold reward of the synthetic benchmark as a judge; equal rewards prefer neither.

    Args:
        seed: of the synthetic benchmark (``--data.source.seed`` of the runs).
    """

    def __init__(self, seed: int = 0):
        self.world = World(seed)
        self.name = "gold reward"
        self.settings = {"world": seed}

    def compare(self, items: Sequence[Comparison], store: AnswerStore) -> list[Verdict]:
        """Score 2 N responses; a prompt from elsewhere raises UserError."""
        # A chat is none of its prompts.
        return [
            by_scores(*(self.world.gold_reward(str(item.prompt), text) for text in (item.first, item.second)))
            for item in items
        ]
