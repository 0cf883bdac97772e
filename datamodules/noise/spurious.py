"""Noise of annotators who are swayed by the surface of a response: its length, or a favoured word."""

from __future__ import annotations

import math
import re

import numpy as np
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_info

from pacmr_lightning.errors import UserError

from ..prompts import split_row
from ..rows import values_of
from .base import LabelNoise
from .calibration import calibrated, check_share
from .known_preferences import LOG_RANGE, log_odds, redrawn

_WORD = re.compile(r"\w+")


class SpuriousPreferenceNoise(LabelNoise):
    """Labels lean to a feature that has nothing to do with quality (length bias: arXiv 2310.03716).

    The label of a pair becomes a draw from P(the response found as chosen is preferred) =
    sigma(dr + lambda d): dr = logit(eta), and d is how much more of the feature that response has. As few
    labels change as that law allows, so only pairs whose rejected response has more of the feature are
    flipped: P(flip) = 1 - sigma(dr + lambda d) / sigma(dr). Where a row has no ``eta``, dr counts as 0, and
    P(flip) = tanh(-lambda d / 2): labels are taken as found, and those against the feature are flipped the
    more often the larger the difference.

    A policy can learn such a rule, unlike flips that follow no rule.

    Args:
        share: expected share of flipped labels over the training rows, above 0 and below 0.5; it decides
            lambda.
        word: the feature is whether this word is in the response, in small or capital letters; None: it is
            the response's length in characters.
    """

    def __init__(self, share: float, word: str | None = None):
        check_share(share)
        if word is not None and not _WORD.fullmatch(word):
            raise UserError(f"word is {word!r}, but it must be a single word, such as golden.")
        self.share = share
        self.word = word

    def feature(self, response: str) -> int:
        """How much of the feature a response has."""
        if self.word is None:
            return len(response.strip())
        return int(self.word.casefold() in _WORD.findall(response.casefold()))

    def probabilities(self, rows: Dataset) -> list[float]:
        """N probabilities; 0 where the rejected response has no more of the feature.

        Raises:
            UserError: the share cannot be reached.
        """
        splits = [split_row(*row) for row in values_of(rows, "prompt", "chosen", "rejected", "chat")]
        more = np.array([self.feature(s.chosen) - self.feature(s.rejected) for s in splits])
        gaps = log_odds([0.5 if eta is None else eta for eta in rows["eta"][:]])

        def flips(log_lambda: float) -> np.ndarray:
            return redrawn(gaps, gaps + math.exp(log_lambda) * more)

        feature = "is longer" if self.word is None else f"alone has the word {self.word!r}"
        why = f"the rejected response {feature} in {np.mean(more < 0):.1%} of the pairs, and others stay"
        log_lambda = calibrated(self.share, flips, -LOG_RANGE, LOG_RANGE, why)
        rank_zero_info(f"SpuriousPreferenceNoise: lambda {math.exp(log_lambda):.4g}")
        return flips(log_lambda).tolist()
