"""Hash of a text and a seed, for splits, samples and label noise."""

import hashlib


def unit_hash(text: str, seed: int) -> float:
    """Return a number in [0, 1) that depends only on ``text`` and ``seed``: 53 bits of BLAKE2b."""
    digest = hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest()
    # 64 bits could round up to 1.0; a float holds 53 exactly.
    return (int.from_bytes(digest, "big") >> 11) / 2**53
