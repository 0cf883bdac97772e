"""Label noise that does not depend on order, machine, number of ranks or method.

A pair is flipped iff the hash of its id, mapped to [0, 1), lies under the rate. So masks are nested: a pair
flipped at 20% is flipped at 40%, and two runs with one ``noise_seed`` train on the same wrong labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import UserError


def unit_hash(text: str, seed: int) -> float:
    """A number in [0, 1) that depends on nothing but ``text`` and ``seed``: 53 bits of BLAKE2b."""
    digest = hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest()
    # All 64 bits would round up to exactly 1.0 for the largest hashes; a float holds 53 without rounding.
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def check_rate(rate: float) -> None:
    """Raises UserError unless ``rate`` is a probability in [0, 1)."""
    if not 0 <= rate < 1:
        raise UserError(
            f"noise_rate is {rate}, but as a share of labels it must lie in [0, 1); use 0.2 for 20%."
        )


def flip_mask(ids: Sequence[str], rate: float, seed: int) -> list[bool]:
    """Which pairs get their label flipped.

    Args:
        ids: N pair ids.
        rate: probability of a flip, in [0, 1).
        seed: seed of the noise; another seed flips other pairs.

    Returns:
        N flags. Flags of one id are the same in every list, and those of a lower rate are a subset.

    Raises:
        UserError: the rate is outside [0, 1).
    """
    check_rate(rate)
    return [unit_hash(pair, seed) < rate for pair in ids]


def flip_flags(given: Sequence[int], mask: Sequence[bool], rate: float) -> list[int]:
    """What is known of N labels once ``mask`` is applied: 1 flipped, 0 not, -1 unknown.

    Args:
        given: N values of the data's own ``flipped`` column, -1 where it says nothing.
        mask: N flags, true where the noise swaps the two responses.
        rate: the noise rate. At 0 nothing is claimed of rows that say nothing of themselves; above 0 their
            flag is relative to the label that was found.
    """
    return [
        known ^ int(swap) if known != UNKNOWN else (int(swap) if rate > 0 else UNKNOWN)
        for known, swap in zip(given, mask, strict=True)
    ]
