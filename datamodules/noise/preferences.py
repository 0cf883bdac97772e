"""Label noise that depends on the reward difference or on a surface feature of the responses."""

import re
from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from scipy.special import expit, log_expit, logit

from pacmr_lightning.errors import UserError, check_within

from ..reading import response_texts
from .base import LabelNoise, calibrated, check_share, check_share_or

_WORD = re.compile(r"\w+")


class NearTieNoise(LabelNoise):
    """Near ties are flipped most: ``P(flip) = sigma(-|dr| / tau)``, dr = logit(eta).

    Sources: B-Pref (arXiv 2111.03026), Gao et al. (arXiv 2404.09824).

    Args:
        share: expected noise rate over the training rows, above 0 and below 0.5; it decides tau.
    """

    def __init__(self, share: float):
        check_share(share)
        self.share = share

    def probabilities(self, rows: Dataset) -> list[float]:
        """Return N probabilities, up to 0.5 at a tie."""
        gaps = np.abs(_reward_gaps(rows, "NearTieNoise"))
        why = "a tie is flipped with probability 0.5 at every tau"
        return calibrated(self.share, "NearTieNoise: tau", lambda tau: expit(-gaps / tau), why)


class TemperatureLabels(LabelNoise):
    """Resampled labels at another temperature: P(response found as chosen is preferred) = sigma(dr / tau).

    A negative control: the labels are Bradley-Terry draws with rewards divided by tau. That only rescales
    DPO's beta, so no method should win once each has its best beta. As few labels change as possible, P(flip)
    = 1 - sigma(dr / tau) / sigma(dr): likely labels above tau 1, unlikely ones below.

    Args:
        tau: the temperature, above 0; labels are noisier above 1.
        share: expected noise rate over the training rows instead, above 0 and below 0.5; it
            decides tau, above 1.
    """

    def __init__(self, tau: float | None = None, share: float | None = None):
        check_share_or("TemperatureLabels", "tau", tau, share)
        check_within("(0, inf)", "; 1 leaves labels as found", tau=tau)
        self.tau = tau
        self.share = share

    def probabilities(self, rows: Dataset) -> list[float]:
        """Return N probabilities."""
        gaps = _reward_gaps(rows, "TemperatureLabels")

        def flips(tau: float) -> np.ndarray:
            return redrawn(gaps, gaps / tau)

        if self.tau is not None:
            return flips(self.tau).tolist()
        assert self.share is not None  # one of the two was given
        why = "at an infinite tau both responses are equally likely to be preferred, and some labels stay"
        return calibrated(self.share, "TemperatureLabels: tau", flips, why, lowest=0.0)


class SpuriousPreferenceNoise(LabelNoise):
    """Labels lean to a feature that is unrelated to quality (length bias: arXiv 2310.03716).

    A label becomes a draw from P(response found as chosen is preferred) = sigma(dr + lambda d), where dr =
    logit(eta) and d is the feature's difference, chosen minus rejected. As few labels change as possible:
    P(flip) = 1 - sigma(dr + lambda d) / sigma(dr) if d < 0, else 0. Without ``eta`` dr is 0, and P(flip) =
    tanh(-lambda d / 2). A policy can learn such a shortcut, unlike random flips.

    Args:
        share: expected noise rate over the training rows, above 0 and below 0.5; it decides
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
        """Return how much of the feature a response has."""
        if self.word is None:
            return len(response.strip())
        return int(self.word.casefold() in _WORD.findall(response.casefold()))

    def probabilities(self, rows: Dataset) -> list[float]:
        """Return N probabilities; 0 where the rejected response has no more of the feature."""
        more = np.array([self.feature(one) - self.feature(other) for one, other in response_texts(rows)])
        gaps = _log_odds([0.5 if eta is None else eta for eta in rows["eta"][:]])
        feature = "is longer" if self.word is None else f"alone has the word {self.word!r}"
        why = f"the rejected response {feature} in {np.mean(more < 0):.1%} of the pairs, and others stay"

        def flips(strength: float) -> np.ndarray:
            return redrawn(gaps, gaps + strength * more)

        return calibrated(self.share, "SpuriousPreferenceNoise: lambda", flips, why)


def redrawn(now: np.ndarray, then: np.ndarray) -> np.ndarray:
    """Return (N,) probabilities of the fewest flips that turn draws of one law into draws of another.

    ``now`` and ``then`` are (N,) log odds that the response found as chosen is preferred. A label for it is
    kept with probability min(1, sigma(then) / sigma(now)), one for the other response likewise with both
    signs changed. After the flips P(it is preferred) = sigma(then).
    """
    return -np.expm1(np.minimum(log_expit(then) - log_expit(now), 0.0))


def _reward_gaps(rows: Dataset, kind: str) -> np.ndarray:
    """Return (N,) dr = logit(eta), the reward of the response found as chosen minus the other's."""
    known = rows["eta"][:]
    unknown = [pair for pair, eta in zip(rows["id"][:], known, strict=True) if eta is None]
    if unknown:
        raise UserError(
            f"{kind} needs eta, the probability that the chosen response is better, of every pair, but "
            f"{len(unknown)} of the {len(known)} training pairs have none, {unknown[0]!r} for one; add the "
            "column eta, or choose a kind of noise that does without."
        )
    return _log_odds(known)


def _log_odds(probabilities: Sequence[float]) -> np.ndarray:
    # Probabilities rounded to 0 or 1 have no finite log odds.
    return logit(np.clip(np.array(probabilities, dtype=float), 1e-12, 1 - 1e-12))
