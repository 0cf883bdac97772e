"""The parts of Algorithm 1 that ``weighting.algorithm_1`` puts together: d_meta and c_i."""

from .estimators import CentralDifference, GhostDotProduct, MetaGradientEstimator
from .outer_objectives import (
    CleanPreference,
    OuterGradient,
    OuterObjective,
    PromptAugmentationConsistency,
    SoftPromptConsistency,
)
from .step_pairs import StepPairs

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
