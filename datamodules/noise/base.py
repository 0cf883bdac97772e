"""Label noise: its base class, noise at one or two rates or from a file, and calibration to a noise rate."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_info
from scipy.optimize import brentq

from pacmr_lightning.errors import UserError, check_rates, check_within
from pacmr_lightning.files import unit_hash

from ..reading import numbered_rows, response_texts

LOG_RANGE = 30.0
"""Temperatures and strengths are searched between exp(-30) and exp(30)."""


class LabelNoise(ABC):
    """Base class of label noise: the flip probability of each training pair."""

    rate: float | None = None
    """Flip probability if all pairs have the same, else None."""

    @abstractmethod
    def probabilities(self, rows: Dataset) -> Sequence[float]:
        """Return each row's flip probability, in [0, 1]; raise a UserError if the noise does not fit.

        Called once before training, on every rank with the same rows. It may use the labels, but must draw
        nothing: ``flips`` compares the probability with the hash of the row's id.

        Args:
            rows: all N training rows as found, with the columns of ``reading.read_preferences``; ``chosen``
                is the response that the data prefers.
        """

    def flips(self, rows: Dataset, seed: int) -> dict[str, bool]:
        """Return, by id, whether each row's label is flipped; another seed flips other pairs."""
        ids, probabilities = rows["id"][:], self.probabilities(rows)
        odd = [p for p in probabilities if not 0 <= p <= 1]
        if odd or len(probabilities) != len(ids):
            among = f", {odd[0]} among them," if odd else ""
            raise UserError(
                f"{type(self).__name__} gives {len(probabilities)} probabilities{among} for {len(ids)} "
                "training pairs; each needs one in [0, 1]."
            )
        return {i: bool(unit_hash(i, seed) < p) for i, p in zip(ids, probabilities, strict=True)}


class SymmetricNoise(LabelNoise):
    """All labels are flipped with one probability.

    Args:
        rate: that probability, in [0, 1).
    """

    rate: float

    def __init__(self, rate: float):
        check_rates(noise_rate=rate)
        self.rate = rate

    def probabilities(self, rows: Dataset) -> list[float]:
        """Return the rate for every row."""
        return [self.rate] * len(rows)


class TwoRateNoise(LabelNoise):
    """One flip probability for pairs whose first response is the chosen one, another for the others.

    As in appendix D of Qu et al. First is the response whose text has the smaller hash, whatever the label.

    Args:
        rates: both probabilities, in [0, 1).
    """

    def __init__(self, rates: Sequence[float]):
        if len(rates) != 2:
            raise UserError(f"rates is {list(rates)}, but two rates are needed, such as [0.1, 0.3].")
        for value in rates:
            check_rates(**{"one of rates": value})
        self.rates = rates

    def probabilities(self, rows: Dataset) -> list[float]:
        """Return one of the two rates for each row."""
        keys = ([(unit_hash(text, 0), text) for text in responses] for responses in response_texts(rows))
        return [self.rates[0 if chosen < rejected else 1] for chosen, rejected in keys]


class NoiseFromMask(LabelNoise):
    """Label noise from a file of flips.

    Args:
        mask: JSON Lines or Parquet with ``id``, ``flipped`` and perhaps ``texts``, a hash, as a run keeps it
            in ``noise_mask.parquet``.
    """

    def __init__(self, mask: str):
        self.mask = mask

    def probabilities(self, rows: Dataset) -> list[float]:
        """Return 1 for rows that are flipped, 0 for the others."""
        mask, texts = dict[str, float](), dict[str, str | None]()
        for place, row in numbered_rows(self.mask):
            name, flipped = row.get("id"), row.get("flipped")
            if name is None or flipped not in (True, False) or mask.get(str(name), flipped) != flipped:
                raise UserError(
                    f"{place} has id {name!r} and flipped {flipped!r}, but a mask needs an id and true or "
                    "false, the same in all rows of an id."
                )
            mask[str(name)] = float(flipped)
            texts[str(name)] = row.get("texts")
        ids = rows["id"][:]
        if missing := [pair for pair in ids if pair not in mask]:
            raise UserError(
                f"mask is {self.mask}, but it lacks {len(missing)} of the {len(ids)} training "
                f"pairs, {missing[0]!r} for one; give the mask of these pairs."
            )
        pairs = zip(ids, rows["texts"][:], strict=True)
        if other := [pair for pair, key in pairs if texts[pair] is not None and texts[pair] != key]:
            raise UserError(
                f"mask is {self.mask}, but there {len(other)} of the {len(ids)} training pairs have other "
                f"texts, {other[0]!r} for one; give the mask of these pairs."
            )
        if bare := sum(texts[pair] is None for pair in ids):
            rank_zero_info(
                f"{self.mask} has no texts of {bare} of {len(ids)} pairs, which are found by id alone."
            )
        return [mask[pair] for pair in ids]


def check_share(share: float | None) -> None:
    """Raise a UserError unless ``share``, an expected noise rate, lies above 0 and below 0.5 or is None."""
    check_within("(0, 0.5)", ", as an expected noise rate; use 0.3 for 30%", share=share)


def check_share_or(kind: str, option: str, value: object, share: float | None) -> None:
    """Raise a UserError unless either ``value`` or an expected noise rate is given."""
    if (value is None) == (share is None):
        raise UserError(
            f"{kind} has {option} {value} and share {share}; give one of the two, such as share 0.3."
        )
    check_share(share)


def calibrated(
    share: float, title: str, flips: Callable[[float], np.ndarray], why: str, lowest: float = -LOG_RANGE
) -> list[float]:
    """Return N flip probabilities at the strength at which they average ``share``; print it after ``title``.

    ``flips`` returns them for a strength, from exp(``lowest``) on, with which none of them falls.
    """

    def expected(log: float) -> float:
        # The last digits of a plain sum, and so the mask, would depend on the order of the rows.
        probabilities = flips(math.exp(log))
        return math.fsum(probabilities.tolist()) / len(probabilities)

    least, most = expected(lowest), expected(LOG_RANGE)
    if not least <= share <= most:
        raise UserError(
            f"share is {share}, but between {least:.1%} and {most:.1%} of these labels can be expected to be "
            f"flipped: {why}."
        )
    strength = math.exp(brentq(lambda log: expected(log) - share, lowest, LOG_RANGE))
    rank_zero_info(f"{title} {strength:.4g}")
    return flips(strength).tolist()
