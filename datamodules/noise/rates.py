"""Flips at one rate, or at one of two, whatever the pair says."""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset

from pacmr_lightning.errors import UserError

from ..hashing import unit_hash
from ..prompts import split_row
from ..rows import values_of
from .base import LabelNoise, check_rate


class SymmetricNoise(LabelNoise):
    """All labels are flipped with one probability.

    Args:
        rate: that probability, in [0, 1).
    """

    rate: float

    def __init__(self, rate: float):
        check_rate("noise_rate", rate)
        self.rate = rate

    def probabilities(self, rows: Dataset) -> list[float]:
        """The rate, for every row."""
        return [self.rate] * len(rows)


class TwoRateNoise(LabelNoise):
    """One probability for pairs whose first response is the chosen one, another for those whose second is.

    (Paper, appendix D.) First is the response whose text has the smaller hash, an order that knows nothing of
    labels.

    Args:
        rates: both probabilities, in [0, 1).
    """

    def __init__(self, rates: Sequence[float]):
        if len(rates) != 2:
            raise UserError(f"noise_rates is {list(rates)}, but two rates are needed, such as [0.1, 0.3].")
        for value in rates:
            check_rate("noise_rates", value)
        self.rates = rates

    def probabilities(self, rows: Dataset) -> list[float]:
        """One of the two rates for each row."""
        splits = (split_row(*row) for row in values_of(rows, "prompt", "chosen", "rejected", "chat"))
        return [self.rates[0 if _is_first(s.chosen, s.rejected) else 1] for s in splits]


def _is_first(response: str, other: str) -> bool:
    return (unit_hash(response, 0), response) < (unit_hash(other, 0), other)
