"""The choices of ``pacmr audit --scorer``: who judges the labels, and what the scores are called."""

from __future__ import annotations

from typing import Literal

Scorer = Literal["vnet", "dpo", "policy", "first_visit", "probe"]

NAMES: dict[Scorer, str] = {
    "vnet": "weight",
    "dpo": "cross-fitted u",
    "policy": "u",
    "first_visit": "u at the first visit",
    "probe": "linear probe",
}
"""What tables call the scores."""
SCORES: dict[Scorer, str] = {
    "vnet": "weight",
    "dpo": "cross_fit_u",
    "policy": "unpulled_u",
    "first_visit": "first_visit_u",
    "probe": "probe_u",
}
"""Columns of the scores; a low value makes a label suspect."""
BASIS: dict[Scorer, str] = SCORES | {"vnet": "unpulled_u"}
"""Columns that change sign with the label, from which the noise rate is estimated."""
UNSEEN: tuple[Scorer, ...] = ("probe", "dpo", "first_visit")
"""Scorers that have not learned the labels that they judge."""
