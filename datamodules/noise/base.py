"""What every kind of label noise is: each pair's probability of a flip, and a draw by the hash of its id."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from datasets import Dataset

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
            flips[pair] = bool(unit_hash(pair, seed) < probability)
        return flips


def check_rate(option: str, rate: float) -> None:
    """Raises a UserError where the option is no probability of a flip, in [0, 1)."""
    if not 0 <= rate < 1:
        raise UserError(
            f"{option} is {rate}, but as a share of labels it must lie in [0, 1); use 0.2 for 20%."
        )
