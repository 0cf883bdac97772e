"""Stratified samples of rows, by hashes of their names."""

from collections import defaultdict
from collections.abc import Sequence

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import unit_hash


def stratified_sample(
    names: Sequence[str], categories: Sequence[str | None], size: int, seed: int
) -> list[int]:
    """Return ``size`` of N row indices, ascending, with categories in proportion (largest remainders).

    Each category (None is one) contributes the rows with the smallest hash of seed and unique name. So the
    sample is independent of the order, and a larger one mostly contains a smaller one.
    """
    if not 1 <= size <= len(names):
        raise UserError(
            f"n is {size}, but a sample of the {len(names)} rows that there are must have 1 to {len(names)}."
        )
    strata: dict[str | None, list[int]] = defaultdict(list)
    for row, category in enumerate(categories):
        strata[category].append(row)
    shares = {category: size * len(rows) / len(names) for category, rows in strata.items()}
    counts = {category: int(share) for category, share in shares.items()}
    # Ties are broken by name, not by the rows' order.
    by_remainder = sorted(strata, key=lambda c: (counts[c] - shares[c], str(c)))
    for category in by_remainder[: size - sum(counts.values())]:
        counts[category] += 1
    taken = []
    for category, rows in strata.items():
        rows.sort(key=lambda row: (unit_hash(names[row], seed), names[row]))
        taken += rows[: counts[category]]
    return sorted(taken)
