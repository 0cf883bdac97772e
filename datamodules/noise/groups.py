"""Label noise that differs between categories or annotators."""

from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_info

from pacmr_lightning.errors import UserError, check_rates, check_within
from pacmr_lightning.files import unit_hash

from .base import LabelNoise, calibrated, check_share_or


class CategoryNoise(LabelNoise):
    """A flip probability for each category.

    Args:
        rates: probabilities by category, in [0, 1).
        others: that of pairs of other categories, or of none.
        share: expected noise rate over the training rows instead, above 0 and below 0.5: see
            ``spread_rates``. Pairs without a category are one of their own.
    """

    def __init__(
        self, rates: dict[str, float] | None = None, others: float = 0.0, share: float | None = None
    ):
        check_share_or("CategoryNoise", "rates", rates, share)
        check_rates(others=others, **{f"rates of {name!r}": rate for name, rate in (rates or {}).items()})
        if share is not None and others:
            raise UserError(f"CategoryNoise has share {share} and others {others}; take one of them out.")
        self.rates = _by_text(rates)
        self.others = others
        self.share = share

    def probabilities(self, rows: Dataset) -> list[float]:
        """Return the rate of each row's category."""
        categories = rows["category"][:]
        if self.share is not None:
            return spread_rates(self.share, categories, "CategoryNoise")
        for name in self.rates:
            if name not in categories:
                raise UserError(
                    f"rates names {name!r}, but no training pair is of that category (there are "
                    f"{_some(categories)}); correct the name (in YAML, one such as 007 needs quotes)."
                )
        return [self.rates.get(category, self.others) for category in categories]


class AnnotatorNoise(LabelNoise):
    """Annotators of different reliability: P(flip) = 1 - the reliability of the pair's annotator.

    As in Dawid and Skene's model and RE-PO (arXiv 2509.24159). If no row has an ``annotator``, the hash of
    its id assigns one, of ten with a ``share``, which a run's ``noise_mask.parquet`` records.

    Args:
        share: expected noise rate over the training rows, above 0 and below 0.5: the least
            reliable annotator guesses; see ``spread_rates``.
        reliabilities: by annotator, in [0, 1], instead; 0.5 is a guess.
    """

    def __init__(self, share: float | None = None, reliabilities: dict[str, float] | None = None):
        check_share_or("AnnotatorNoise", "reliabilities", reliabilities or None, share)
        named = {f"reliabilities of {name!r}": value for name, value in (reliabilities or {}).items()}
        check_within("[0, 1]", "; 0.5 is a guess", **named)
        self.share = share
        self.reliabilities = _by_text(reliabilities)
        self._names = list(self.reliabilities or (f"annotator-{k}" for k in range(1, 11)))

    def annotators(self, rows: Dataset) -> list[str]:
        """Return each row's annotator, as the data names it or assigned by the hash of its id."""
        ids, annotators = rows["id"][:], rows["annotator"][:]
        unknown = [pair for pair, name in zip(ids, annotators, strict=True) if name is None]
        if len(unknown) == len(ids):
            return [self._names[int(len(self._names) * unit_hash(f"annotator of {i}", 0))] for i in ids]
        if unknown:
            raise UserError(
                f"{len(unknown)} of the {len(ids)} training pairs have no annotator, {unknown[0]!r} for one; "
                "give all of them one, or none, and they are assigned."
            )
        return annotators

    def probabilities(self, rows: Dataset) -> list[float]:
        """Return 1 - the reliability of each row's annotator."""
        names = self.annotators(rows)
        if self.share is not None:
            return spread_rates(self.share, names, "AnnotatorNoise")
        assigned = rows["annotator"][:1] == [None]
        if not assigned and (odd := sorted(set(names) ^ self.reliabilities.keys())):
            wrong = "has no pair" if odd[0] in self.reliabilities else "is left out"
            raise UserError(
                f"reliabilities must name the annotators of the training pairs ({_some(names)}), but "
                f"{odd[0]!r} {wrong}; correct them (in YAML, names such as 007 need quotes)."
            )
        return [1 - self.reliabilities[name] for name in names]


def spread_rates(share: float, groups: Sequence[str | None], kind: str) -> list[float]:
    """Return each row's flip probability by its group, such that the expected noise rate is ``share``.

    The k-th of K groups, in the order of the hashes of their names, has the rate 0.5 (k / K)^gamma. The last
    one guesses, and gamma follows from the share.
    """
    names = sorted(set(groups), key=lambda name: (unit_hash(str(name), 0), str(name), name is None))
    place = {name: (k + 1) / len(names) for k, name in enumerate(names)}
    places = np.array([place[group] for group in groups])

    def flips(strength: float) -> np.ndarray:
        return 0.5 * places ** (1 / strength)

    why = f"the least reliable of the {len(names)} groups of pairs guesses, and none is worse"
    probabilities = calibrated(share, f"{kind}: 1 / gamma", flips, why, lowest=-10.0)
    rates = dict(zip(groups, probabilities, strict=True))
    shown = ", ".join(f"{name} {rates[name]:.1%}" for name in names[-10:])
    rank_zero_info(f"{kind}: flip rates {shown}{' (the ten largest)' if len(names) > 10 else ''}")
    return probabilities


def _by_text(values: dict[str, float] | None) -> dict[str, float]:
    """Return values by the texts of their names, which YAML may have read as numbers."""
    return {str(name): value for name, value in (values or {}).items()}


def _some(names: Sequence[str | None]) -> str:
    return ", ".join(sorted({str(name) for name in names})[:10])
