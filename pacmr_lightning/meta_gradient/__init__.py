"""The parts of Algorithm 1, which ``weighting.algorithm_1`` puts together.

``outer_objectives`` compute d_meta at omega - alpha gradient, where ``PolicyModel.shifted`` runs the policy;
estimators in ``step_pairs`` compute c_i = d_meta . grad l_i(omega) of each training pair.
"""

from .outer_objectives import (
    CleanPreference,
    OuterGradient,
    OuterObjective,
    PromptAugmentationConsistency,
    SoftPromptConsistency,
)
from .step_pairs import CentralDifference, GhostDotProduct, MetaGradientEstimator, StepPairs

__all__ = [
    "CentralDifference",
    "CleanPreference",
    "GhostDotProduct",
    "MetaGradientEstimator",
    "OuterGradient",
    "OuterObjective",
    "PromptAugmentationConsistency",
    "SoftPromptConsistency",
    "StepPairs",
]
