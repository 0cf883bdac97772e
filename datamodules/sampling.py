"""Stratified samples: every category in proportion, the same rows for the same seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pacmr_lightning.errors import UserError

from .hashing import unit_hash


def stratified_sample(
    names: Sequence[str], categories: Sequence[str | None], size: int, seed: int
) -> list[int]:
    """Indices of ``size`` of N rows, with categories in proportion (largest remainders).

    Within a category the rows with the smallest hash of name and seed are taken, so the sample does not
    depend on the rows' order, and a larger one of the same seed mostly contains a smaller one.

    Args:
        names: N names, unique (ids, or hashes of prompts).
        categories: N categories; None is a category too.
        size: at least 1 and at most N.
        seed: another seed takes other rows.

    Returns:
        The indices in ascending order.

    Raises:
        UserError: ``size`` is outside 1..N.
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
    # Ties are broken by name and not by the rows' order.
    by_remainder = sorted(strata, key=lambda c: (counts[c] - shares[c], str(c)))
    for category in by_remainder[: size - sum(counts.values())]:
        counts[category] += 1
    taken = []
    for category, rows in strata.items():
        rows.sort(key=lambda row: (unit_hash(names[row], seed), names[row]))
        taken += rows[: counts[category]]
    return sorted(taken)
