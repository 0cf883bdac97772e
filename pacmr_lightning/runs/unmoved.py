"""Detection of a run whose policy still equals its reference."""

from collections.abc import Mapping
from typing import Any

MARGIN, KL = 0.005, 1e-4
"""Validation margin u, and KL per token to the reference, in nats, of a policy that has moved."""


def unmoved(metrics: Mapping[str, Any]) -> str | None:
    """Return a sentence if the policy still equals its reference; None if it moved or was not validated."""
    loss, margin, kl = (metrics.get(f"val/{name}") for name in ("loss", "rewards/margins", "kl"))
    if loss is None or margin is None or kl is None or abs(margin) >= MARGIN or kl >= KL:
        return None
    return f"The policy did not move: its validation loss is {loss:.4f} and its KL to the reference {kl:.2g}"
