"""Calls of a judge before they are made: their number, tokens and price."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import UserError, check_at_least
from .conversation import Messages, message_text
from .judging import PairJudge

MILLION = 1_000_000
Prices = tuple[float | None, float | None]
"""Price of a million tokens of prompts and of answers, in any currency; both or none."""
CHARACTERS = 4
"""Characters of a token, of English text; for estimates only."""


@dataclass(frozen=True)
class Calls:
    """Calls of a paid judge model, with their tokens."""

    number: int
    tokens_in: float
    """Estimated from characters."""
    tokens_out: int | None
    """At most; None without a limit."""

    def sentence(self, prices: Prices) -> str:
        """Return the calls, tokens and price in words."""
        words = [f"{self.number:,} calls, about {self.tokens_in:,.0f} tokens in"]
        words += [] if self.tokens_out is None else [f"at most {self.tokens_out:,} out"]
        if (cost := price(self.tokens_in, self.tokens_out or 0, prices)) is not None:
            words.append(f"cost about {cost:,.2f}" + (" and the answers'" if self.tokens_out is None else ""))
        return ", ".join(words)


def price(prompt: float, completion: float, prices: Prices) -> float | None:
    """Return the price of tokens; None without prices."""
    of_prompt, of_completion = prices
    if of_prompt is None or of_completion is None:
        return None
    return (prompt * of_prompt + completion * of_completion) / MILLION


def check_prices(prompt_price: float | None, completion_price: float | None, place: str = "") -> None:
    """Raise a UserError for prices below 0, or for one without the other; it begins with ``place``."""
    check_at_least(0, **{f"{place}prompt_price": prompt_price, f"{place}completion_price": completion_price})
    if (prompt_price is None) != (completion_price is None):
        raise UserError(
            f"{place}prompt_price is {prompt_price} and completion_price is {completion_price}; give both or "
            "none."
        )


def calls(judge: PairJudge, questions: Iterable[Messages]) -> Calls:
    """Return number and tokens of questions that a judge will send."""
    lengths = [sum(len(message_text(message)) for message in messages) for messages in questions]
    limit = judge.settings.get("max_tokens")
    return Calls(len(lengths), sum(lengths) / CHARACTERS, None if limit is None else len(lengths) * limit)
