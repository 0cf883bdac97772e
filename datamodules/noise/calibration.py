"""Strengths of noise at which a given share of the labels is expected to be flipped."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq

from pacmr_lightning.errors import UserError


def check_share(share: float) -> None:
    """Raises a UserError where that is no share of labels to flip, above 0 and below 0.5."""
    if not 0 < share < 0.5:
        raise UserError(
            f"share is {share}, but the expected share of flipped labels lies above 0 and below 0.5; use 0.3 "
            "for 30%."
        )


def calibrated(
    share: float, probabilities: Callable[[float], np.ndarray], lowest: float, highest: float, why: str
) -> float:
    """The strength at which the mean of the probabilities is the share.

    Args:
        share: expected share of flipped labels.
        probabilities: (N,) probabilities of a flip at a strength, none of which falls where it rises.
        lowest: strength from which on it is looked for.
        highest: strength up to which.
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
