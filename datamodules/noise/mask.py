"""Files that say which labels are flipped, and what is then known of each label."""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import UserError

from ..reading import numbered_rows
from .base import LabelNoise


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
