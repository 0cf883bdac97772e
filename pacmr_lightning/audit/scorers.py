"""Choices of ``pacmr audit --scorer``, and names of their scores."""

from typing import Literal

Choice = Literal["vnet", "dpo", "policy", "pre_update", "probe", "judge"]
Scorer = Literal[Choice, "combined"]
"""Combined: a score with decisions by hand, in place of the chosen one."""

NAMES: dict[Scorer, str] = {
    "vnet": "weight",
    "dpo": "cross-fitted u",
    "policy": "u",
    "pre_update": "pre-update u",
    "probe": "linear probe",
    "judge": "score and judges",
    "combined": "score with decisions",
}
"""Names in tables."""
SCORES: dict[Scorer, str] = {
    "vnet": "weight",
    "dpo": "cross_fit_u",
    "policy": "unpulled_u",
    "pre_update": "pre_update_u",
    "probe": "probe_u",
    "judge": "judged_u",
    "combined": "combined_u",
}
"""Columns; low values are suspected."""
VOTE = "vote_"
"""Beginning of the column of each judge's votes."""
BASIS: dict[Scorer, str] = SCORES | {"vnet": "unpulled_u"}
"""Columns that change sign with the label, for the noise rate."""
UNSEEN: tuple[Scorer, ...] = ("probe", "dpo", "pre_update")
"""Scorers that were not trained on the labels that they score."""
