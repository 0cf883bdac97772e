"""What speaks against a second pass, told without clean labels."""

from __future__ import annotations

import math
from typing import Any

FURTHEST = 10.0
"""Nats from the reference to whole responses. The best of 60,000 samples of the reference is as far."""


def doubts(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Reasons not to use a second pass before somebody has read what it writes.

    It is worse than the first pass where it has gone too far, which its KL says (``val/sequence_kl``;
    docs/results.md has how well), or where it agrees with clearly fewer labels of the validation pairs. That
    is seldom by chance, and seldom seen: flipped validation labels hide most of it.

    Args:
        first: summary of the first run.
        second: summary of the second pass, on the same data.

    Returns:
        Sentences; none where nothing speaks against it, or neither number is known.
    """
    found = []
    kls = [summary["metrics"].get("val/sequence_kl") for summary in (first, second)]
    if kls[1] is not None and kls[1] > FURTHEST:
        other = "" if kls[0] is None else f" (the first run's: {kls[0]:.1f})"
        found.append(f"Its responses are {kls[1]:.1f} nats from the reference{other}, which is far")
    before, after = (summary["val_accuracy"] for summary in (first, second))
    pairs = second.get("val_pairs")
    if pairs and before is not None and after is not None:
        error = math.sqrt((before * (1 - before) + after * (1 - after)) / pairs)
        if before - after > 2 * error:
            found.append(
                f"It agrees with fewer labels of the validation pairs than the first run, {after:.3f} of "
                f"{pairs:,} and not {before:.3f}, beyond chance"
            )
    return [f"{reason}: read some of its responses, or try a larger --beta." for reason in found]
