"""Base class of label noise, and its calibration to a noise rate."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from datasets import Dataset
from scipy.optimize import brentq

from pacmr_lightning.errors import UserError, check_within
from pacmr_lightning.recorded import Recorded

from ..hashing import unit_hash


class LabelNoise(Recorded, ABC):
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
    share: float, probabilities: Callable[[float], np.ndarray], lowest: float, highest: float, why: str
) -> float:
    """Return the strength at which (N,) ``probabilities``, which must not fall with it, average ``share``."""

    def expected(strength: float) -> float:
        # The last digits of a plain sum, and so the mask, would depend on the order of the rows.
        found = probabilities(strength)
        return math.fsum(found.tolist()) / len(found)

    least, most = expected(lowest), expected(highest)
    if not least <= share <= most:
        raise UserError(
            f"share is {share}, but between {least:.1%} and {most:.1%} of these labels can be expected to be "
            f"flipped: {why}."
        )
    return brentq(lambda strength: expected(strength) - share, lowest, highest)
