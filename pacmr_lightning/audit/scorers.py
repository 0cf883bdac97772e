"""Choices of ``pacmr audit --scorer``, and names of their scores."""

from __future__ import annotations

from typing import Literal

Scorer = Literal["vnet", "dpo", "policy", "first_visit", "probe"]

NAMES: dict[Scorer, str] = {
    "vnet": "weight",
    "dpo": "cross-fitted u",
    "policy": "u",
    "first_visit": "pre-update u",
    "probe": "linear probe",
}
"""Names in tables."""
SCORES: dict[Scorer, str] = {
    "vnet": "weight",
    "dpo": "cross_fit_u",
    "policy": "unpulled_u",
    "first_visit": "first_visit_u",
    "probe": "probe_u",
}
"""Columns; low values are suspected."""
BASIS: dict[Scorer, str] = SCORES | {"vnet": "unpulled_u"}
"""Columns that change sign with the label, for the noise rate."""
UNSEEN: tuple[Scorer, ...] = ("probe", "dpo", "first_visit")
"""Scorers that were not trained on the labels that they score."""
