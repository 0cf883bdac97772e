"""Label noise that does not depend on order, machine, number of ranks or method.

A pair is flipped iff the hash of its id, mapped to [0, 1), lies under its own probability of a flip. So masks
are nested: a pair flipped at 20% is flipped at 40%, and two runs with one ``noise_seed`` train on the same
wrong labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from datasets import Dataset

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import UserError

from .hashing import unit_hash
from .prompts import split_row
from .reading import numbered_rows
from .rows import values_of


class LabelNoise(ABC):
    """Which training labels are flipped on purpose: a kind of noise says how probable each pair's flip is."""

    rate: float | None = None
    """The probability of a flip where all pairs have the same; else None."""

    @abstractmethod
    def probabilities(self, rows: Dataset) -> Sequence[float]:
        """Each row's probability of a flip, in [0, 1]; 0 and 1 say for certain.

        Called once, before training, on every rank with the same rows. It may look at the whole row, at its
        labels too, but must draw nothing itself: that is left to the hash of the row's id.

        Args:
            rows: all N training rows as found, with the columns that ``reading.read_preferences`` names;
                ``chosen`` is the response that the data prefers.

        Returns:
            N numbers.

        Raises:
            UserError: the noise does not fit these rows.
        """

    def flips(self, rows: Dataset, seed: int) -> dict[str, bool]:
        """For each id of the rows, whether its label is flipped.

        Args:
            rows: see ``probabilities``.
            seed: another one flips other pairs.

        Raises:
            UserError: see ``probabilities``; or these are not N numbers in [0, 1].
        """
        ids, probabilities = rows["id"][:], self.probabilities(rows)
        if len(probabilities) != len(ids):
            raise UserError(
                f"{type(self).__name__} gives {len(probabilities)} probabilities of {len(ids)} training "
                "pairs; each needs one."
            )
        flips = {}
        for pair, probability in zip(ids, probabilities, strict=True):
            if not 0 <= probability <= 1:
                raise UserError(
                    f"{type(self).__name__} gives the pair {pair!r} the probability {probability} of a flip, "
                    "but it must lie in [0, 1]."
                )
            flips[pair] = unit_hash(pair, seed) < probability
        return flips


class SymmetricNoise(LabelNoise):
    """All labels are flipped with one probability.

    Args:
        rate: that probability, in [0, 1).
    """

    rate: float

    def __init__(self, rate: float):
        _check_rate("noise_rate", rate)
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
            _check_rate("noise_rates", value)
        self.rates = rates

    def probabilities(self, rows: Dataset) -> list[float]:
        """One of the two rates for each row."""
        splits = (split_row(*row) for row in values_of(rows, "prompt", "chosen", "rejected", "chat"))
        return [self.rates[0 if _is_first(s.chosen, s.rejected) else 1] for s in splits]


class CategoryNoise(LabelNoise):
    """A probability for each category.

    Args:
        rates: probabilities by category, in [0, 1).
        others: that of pairs of other categories, or of none.
    """

    def __init__(self, rates: dict[str, float], others: float = 0.0):
        _check_rate("noise_rate", others)
        for category, value in rates.items():
            _check_rate(f"category_noise_rates of {category!r}", value)
        self.rates = rates
        self.others = others

    def probabilities(self, rows: Dataset) -> list[float]:
        """Each row's category's rate.

        Raises:
            UserError: no row is of a named category.
        """
        categories = rows["category"][:]
        for name in self.rates:
            if name not in categories:
                found = ", ".join(sorted({str(c) for c in categories})[:10])
                raise UserError(
                    f"category_noise_rates names {name!r}, but no training pair is of that category (there "
                    f"are {found}); correct the name."
                )
        return [self.rates.get(category, self.others) for category in categories]


class NoiseFromMask(LabelNoise):
    """A file says which pairs are flipped.

    Args:
        mask: JSON Lines or Parquet with ``id`` and ``flipped``, as a run keeps it in ``noise_mask.parquet``.
    """

    def __init__(self, mask: str):
        self.mask = mask

    def probabilities(self, rows: Dataset) -> list[float]:
        """1 for the rows that are flipped, 0 for the others.

        Raises:
            UserError: the mask cannot be read or lacks a row.
        """
        ids, mask = rows["id"][:], read_mask(self.mask)
        missing = [pair for pair in ids if pair not in mask]
        if missing:
            raise UserError(
                f"noise_mask is {self.mask}, but it says nothing of {len(missing)} of the {len(ids)} "
                f"training pairs, {missing[0]!r} for one; give the mask of these pairs."
            )
        return [float(mask[pair]) for pair in ids]


def label_noise(
    noise: LabelNoise | None,
    noise_rate: float,
    noise_rates: Sequence[float] | None,
    category_noise_rates: dict[str, float] | None,
    noise_mask: str | None,
) -> LabelNoise | None:
    """The noise that the datamodule's options ask for; None where labels stay as found.

    Raises:
        UserError: a rate is outside [0, 1), ``noise_rates`` are not two, or more than one kind is given.
    """
    plain = SymmetricNoise(noise_rate)
    kinds = {
        "noise": noise,
        "noise_rates": noise_rates,
        "category_noise_rates": category_noise_rates,
        "noise_mask": noise_mask,
    }
    given = [name for name, value in kinds.items() if value is not None]
    if noise_rate and given != ["category_noise_rates"]:
        given = ["noise_rate", *given]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are given together; take out all but one.")
    if noise_rates is not None:
        return TwoRateNoise(noise_rates)
    if category_noise_rates is not None:
        return CategoryNoise(category_noise_rates, noise_rate)
    if noise_mask is not None:
        return NoiseFromMask(noise_mask)
    return plain if noise_rate else noise


def _check_rate(option: str, rate: float) -> None:
    if not 0 <= rate < 1:
        raise UserError(
            f"{option} is {rate}, but as a share of labels it must lie in [0, 1); use 0.2 for 20%."
        )


def _is_first(response: str, other: str) -> bool:
    return (unit_hash(response, 0), response) < (unit_hash(other, 0), other)


def read_mask(path: str) -> dict[str, bool]:
    """A mask file: whether the label of the pair with that id is flipped.

    Raises:
        UserError: the file cannot be read, or a row has no ``id`` or no ``flipped`` that is true or false.
    """
    mask = {}
    for place, row in numbered_rows(path):
        name, flipped = row.get("id"), row.get("flipped")
        if name is None or flipped not in (True, False):
            raise UserError(
                f"{place} has id {name!r} and flipped {flipped!r}, but a mask needs an id and true or false."
            )
        mask[str(name)] = bool(flipped)
    return mask


def flip_flags(given: Sequence[int], swapped: Sequence[bool] | None) -> list[int]:
    """What is known of N labels once the noise is applied: 1 flipped, 0 not, -1 unknown.

    Args:
        given: N values of the data's own ``flipped`` column, -1 where it says nothing.
        swapped: N flags, true where the noise swaps the two responses; the flags of rows that say nothing of
            themselves are then relative to the label that was found. None: there is no noise, and nothing is
            claimed of them.
    """
    if swapped is None:
        return list(given)
    return [
        known ^ int(swap) if known != UNKNOWN else int(swap)
        for known, swap in zip(given, swapped, strict=True)
    ]
