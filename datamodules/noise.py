"""Label noise that does not depend on order, machine, number of ranks or method.

A pair is flipped iff the hash of its id, mapped to [0, 1), lies under its rate. So masks are nested: a pair
flipped at 20% is flipped at 40%, and two runs with one ``noise_seed`` train on the same wrong labels.
"""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import UserError

from .hashing import unit_hash
from .prompts import split_row
from .reading import numbered_rows
from .rows import values_of


class LabelNoise:
    """Which training labels are flipped on purpose.

    Args:
        rate: probability of a flip, in [0, 1).
        rates: two probabilities instead (paper, appendix D): of the pairs whose first response is the chosen
            one, and of those whose second is. First is the response whose text has the smaller hash, an order
            that knows nothing of labels.
        category_rates: probability by category; pairs of other categories have ``rate``.
        mask: a file that says which pairs are flipped instead: JSON Lines or Parquet with ``id`` and
            ``flipped``, as a run keeps it in ``noise_mask.parquet``.
        seed: another seed flips other pairs.

    Raises:
        UserError: a rate is outside [0, 1), ``rates`` are not two, or more than one kind of noise is given.
    """

    def __init__(
        self,
        rate: float = 0.0,
        rates: Sequence[float] | None = None,
        category_rates: dict[str, float] | None = None,
        mask: str | None = None,
        seed: int = 42,
    ):
        _check_rate("noise_rate", rate)
        if rates is not None and len(rates) != 2:
            raise UserError(f"noise_rates is {list(rates)}, but two rates are needed, such as [0.1, 0.3].")
        for value in rates or ():
            _check_rate("noise_rates", value)
        for category, value in (category_rates or {}).items():
            _check_rate(f"category_noise_rates of {category!r}", value)
        kinds = {"noise_rates": rates, "category_noise_rates": category_rates, "noise_mask": mask}
        given = [name for name, value in kinds.items() if value is not None]
        if rate and given != ["category_noise_rates"]:
            given = ["noise_rate", *given]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} are given together; take out all but one.")
        self.rate, self.rates, self.category_rates, self.mask, self.seed = (
            rate,
            rates,
            category_rates,
            mask,
            seed,
        )

    @property
    def uniform(self) -> bool:
        """Whether every pair has the same probability of a flip, which is ``rate``."""
        return self.rates is None and self.category_rates is None and self.mask is None

    @property
    def is_injected(self) -> bool:
        """Whether labels may be flipped at all."""
        return not self.uniform or self.rate > 0

    def flips(self, rows: Dataset) -> dict[str, bool]:
        """For each id of the rows (as ``reading.read_preferences`` makes them), whether its label is flipped.

        Raises:
            UserError: the mask cannot be read or lacks a row, or no row is of a named category.
        """
        ids = rows["id"][:]
        if self.mask is not None:
            mask = read_mask(self.mask)
            missing = [pair for pair in ids if pair not in mask]
            if missing:
                raise UserError(
                    f"noise_mask is {self.mask}, but it says nothing of {len(missing)} of the {len(ids)} "
                    f"training pairs, {missing[0]!r} for one; give the mask of these pairs."
                )
            return {pair: mask[pair] for pair in ids}
        rates = zip(ids, self._rates(rows), strict=True)
        return {pair: unit_hash(pair, self.seed) < rate for pair, rate in rates}

    def _rates(self, rows: Dataset) -> list[float]:
        """Each row's probability of a flip."""
        if self.rates is not None:
            splits = (split_row(*row) for row in values_of(rows, "prompt", "chosen", "rejected", "chat"))
            return [self.rates[0 if _is_first(s.chosen, s.rejected) else 1] for s in splits]
        if self.category_rates is None:
            return [self.rate] * len(rows)
        categories = rows["category"][:]
        for name in self.category_rates:
            if name not in categories:
                found = ", ".join(sorted({str(c) for c in categories})[:10])
                raise UserError(
                    f"category_noise_rates names {name!r}, but no training pair is of that category (there "
                    f"are {found}); correct the name."
                )
        return [self.category_rates.get(category, self.rate) for category in categories]


def _check_rate(option: str, rate: float) -> None:
    if not 0 <= rate < 1:
        raise UserError(
            f"{option} is {rate}, but as a share of labels it must lie in [0, 1); use 0.2 for 20%."
        )


def _is_first(response: str, other: str) -> bool:
    return (unit_hash(response, 0), response) < (unit_hash(other, 0), other)


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
