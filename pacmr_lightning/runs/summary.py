"""Reads ``summary.json`` of a finished run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .folder import SUMMARY


def read_summary(run: str | Path) -> dict[str, Any]:
    """Return the numbers of a finished run; UserError if its folder has no readable summary."""
    path = Path(run) / SUMMARY
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path} does not exist; name the folder of a run that has finished with the RunSummary callback."
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); train again.") from None


MARGIN, KL = 0.005, 1e-4
"""Validation margin u, and KL per token to the reference, in nats, of a policy that has moved."""


def unmoved(metrics: Mapping[str, Any]) -> str | None:
    """Return a sentence if the policy still equals its reference; None if it moved or was not validated."""
    loss, margin, kl = (metrics.get(f"val/{name}") for name in ("loss", "rewards/margins", "kl"))
    if loss is None or margin is None or kl is None or abs(margin) >= MARGIN or kl >= KL:
        return None
    return f"The policy did not move: its validation loss is {loss:.4f} and its KL to the reference {kl:.2g}"
