"""How much a pair counts: weightings, and how VNet is learned."""

from .base import Weighting, Weights
from .hypergradient import CentralDifference, Estimator, GhostDotProduct
from .learner import VNetWeighting
from .outer import OuterObjective, PromptAugmentationConsistency
from .prior import SigmoidPrior, Unweighted
from .vnet import VNet

__all__ = [
    "CentralDifference",
    "Estimator",
    "GhostDotProduct",
    "OuterObjective",
    "PromptAugmentationConsistency",
    "SigmoidPrior",
    "Unweighted",
    "VNet",
    "VNetWeighting",
    "Weighting",
    "Weights",
]
