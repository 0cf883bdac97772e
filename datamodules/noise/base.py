"""The base of all kinds of label noise, and the strength at which a given share of labels is flipped."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from datasets import Dataset
from scipy.optimize import brentq

from pacmr_lightning.errors import UserError

from ..hashing import unit_hash


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
        """For each id of the rows, whether its label is flipped; another seed flips other pairs.

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
            flips[pair] = bool(unit_hash(pair, seed) < probability)
        return flips


def check_rate(option: str, rate: float) -> None:
    """Raise a UserError unless the option is a probability of a flip, in [0, 1)."""
    if not 0 <= rate < 1:
        raise UserError(
            f"{option} is {rate}, but as a share of labels it must lie in [0, 1); use 0.2 for 20%."
        )


def check_share(share: float) -> None:
    """Raise a UserError unless that is a share of labels to flip, above 0 and below 0.5."""
    if not 0 < share < 0.5:
        raise UserError(
            f"share is {share}, but the expected share of flipped labels lies above 0 and below 0.5; use 0.3 "
            "for 30%."
        )


def calibrated(
    share: float, probabilities: Callable[[float], np.ndarray], lowest: float, highest: float, why: str
) -> float:
    """Return the strength of noise at which the mean probability of a flip is the share.

    Args:
        share: expected share of flipped labels.
        probabilities: (N,) probabilities of a flip at a strength, none of which falls where it rises.
        lowest: least strength.
        highest: greatest strength.
        why: the end of the sentence where the share is out of reach.

    Raises:
        UserError: the share cannot be reached between the two.
    """

    def expected(strength: float) -> float:
        # A plain sum depends on the order of the rows in its last digits, and so would the mask.
        found = probabilities(strength)
        return math.fsum(found.tolist()) / len(found)

    least, most = expected(lowest), expected(highest)
    if not least <= share <= most:
        raise UserError(
            f"share is {share}, but between {least:.1%} and {most:.1%} of these labels can be expected to be "
            f"flipped: {why}."
        )
    return brentq(lambda strength: expected(strength) - share, lowest, highest)
