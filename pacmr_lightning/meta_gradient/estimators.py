"""Estimators of c_i, which stand beside the pairs that they take."""

from .step_pairs import CentralDifference, GhostDotProduct

__all__ = ["CentralDifference", "GhostDotProduct"]
