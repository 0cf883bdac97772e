"""Numbers that depend on a text and a seed alone: what splits, samples and label noise draw with."""

from __future__ import annotations

import hashlib


def unit_hash(text: str, seed: int) -> float:
    """A number in [0, 1) that depends on nothing but ``text`` and ``seed``: 53 bits of BLAKE2b."""
    digest = hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest()
    # All 64 bits would round up to exactly 1.0 for the largest hashes; a float holds 53 without rounding.
    return (int.from_bytes(digest, "big") >> 11) / 2**53
