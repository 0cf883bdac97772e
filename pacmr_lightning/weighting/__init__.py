"""How much a pair counts: weightings, and how VNet is learned."""

from .audited import AuditedWeights
from .base import Weighting, Weights
from .estimators import CentralDifference, Estimator, ExactCoefficients, GhostDotProduct
from .learner import VNetWeighting
from .oracle import DropFlipped, OracleWeights
from .outer_objectives import (
    CleanPreference,
    OuterGradient,
    OuterObjective,
    PromptAugmentationConsistency,
    SoftPromptConsistency,
)
from .prior import SigmoidPrior, Unweighted
from .train_pairs import TrainPairs
from .vnet import VNet

__all__ = [
    "AuditedWeights",
    "CentralDifference",
    "CleanPreference",
    "DropFlipped",
    "Estimator",
    "ExactCoefficients",
    "GhostDotProduct",
    "OracleWeights",
    "OuterGradient",
    "OuterObjective",
    "PromptAugmentationConsistency",
    "SigmoidPrior",
    "SoftPromptConsistency",
    "TrainPairs",
    "Unweighted",
    "VNet",
    "VNetWeighting",
    "Weighting",
    "Weights",
]
