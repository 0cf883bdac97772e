"""The gradient that VNet learns by: Algorithm 1, lines 5 to 11.

``virtual_step`` runs the policy at omega - alpha gradient; ``outer_objectives`` find d_meta there;
``estimators`` find c_i = d_meta . grad l_i(omega) of each training pair, from ``step_pairs`` (a step's pairs
at omega) and ``per_pair_gradients``.
"""

from .estimators import CentralDifference, ExactCoefficients, GhostDotProduct, MetaGradientEstimator
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
    "ExactCoefficients",
    "GhostDotProduct",
    "MetaGradientEstimator",
    "OuterGradient",
    "OuterObjective",
    "PromptAugmentationConsistency",
    "SoftPromptConsistency",
    "StepPairs",
]
