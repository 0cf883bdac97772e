"""Reads ``summary.json`` of a finished run."""

from __future__ import annotations

import json
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
