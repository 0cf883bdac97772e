"""Label noise at one or two rates, or from a file."""

from collections.abc import Sequence

from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_info

from pacmr_lightning.errors import UserError, check_rates

from ..hashing import unit_hash
from ..reading import numbered_rows
from ..row_values import response_texts
from .base import LabelNoise


def noise_from_options(
    noise: LabelNoise | None, noise_rate: float, noise_rates: Sequence[float] | None
) -> LabelNoise | None:
    """Return the noise that the datamodule's three options define; None if labels stay as found."""
    given = {
        "noise_rate": SymmetricNoise(noise_rate) if noise_rate else None,
        "noise": noise,
        "noise_rates": None if noise_rates is None else TwoRateNoise(noise_rates),
    }
    kinds = {name: kind for name, kind in given.items() if kind is not None}
    if len(kinds) > 1:
        raise UserError(f"{' and '.join(kinds)} are given together; take out all but one.")
    return next(iter(kinds.values()), None)


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
            raise UserError(f"noise_rates is {list(rates)}, but two rates are needed, such as [0.1, 0.3].")
        for value in rates:
            check_rates(**{"one of noise_rates": value})
        self.rates = rates

    def probabilities(self, rows: Dataset) -> list[float]:
        """Return one of the two rates for each row."""
        return [self.rates[0 if _is_first(*responses) else 1] for responses in response_texts(rows)]


def _is_first(response: str, other: str) -> bool:
    return (unit_hash(response, 0), response) < (unit_hash(other, 0), other)


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
        mask, texts = {}, {}
        for place, row in numbered_rows(self.mask):
            name, flipped = row.get("id"), row.get("flipped")
            if name is None or flipped not in (True, False):
                raise UserError(
                    f"{place} has id {name!r} and flipped {flipped!r}, but a mask needs an id and true or "
                    "false."
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
