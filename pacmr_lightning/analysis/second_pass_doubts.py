"""Warnings about a second pass, without clean labels."""

from __future__ import annotations

import math
from typing import Any

FURTHEST = 10.0
"""KL to the reference of whole responses, in nats; that of the best of 60,000 reference samples."""


def doubts(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return warnings about a second pass, from the summaries of both runs.

    It is worse if its KL is too high, or if it agrees with clearly fewer (possibly noisy) validation labels.
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
