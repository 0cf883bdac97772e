"""Calls of a judge before they are made: their number, tokens and price."""

from collections.abc import Sequence

from ..errors import UserError, check_at_least
from .conversation import Messages, message_text
from .judging import PairJudge

MILLION = 1_000_000
Prices = tuple[float | None, float | None]
"""Price of a million tokens of prompts and of answers, in any currency; both or none."""
CHARACTERS = 4
"""Characters of a token, of English text; for estimates only."""


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
