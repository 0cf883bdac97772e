"""Choices of ``pacmr audit --scorer``, and names of their scores."""

from typing import Literal

Choice = Literal["probe", "policy", "dpo", "judge"]
Scorer = Literal[Choice, "combined"]
"""Combined: a score with decisions by hand, in place of the chosen one."""

NAMES: dict[Scorer, str] = {
    "probe": "linear probe",
    "policy": "u",
    "dpo": "cross-fitted u",
    "judge": "score and judges",
    "combined": "score with decisions",
}
"""Names in tables."""
SCORES: dict[Scorer, str] = {
    "probe": "probe_u",
    "policy": "u",
    "dpo": "cross_fit_u",
    "judge": "judged_u",
    "combined": "combined_u",
}
"""Columns of scores, which change sign with the label; low values are suspected."""
VOTE = "vote_"
"""Beginning of the column of each judge's verdicts."""
