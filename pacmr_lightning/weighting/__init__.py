"""Weights of pairs: fixed, known or learned."""

from ..rewards import Weights
from .algorithm_1 import VNet, VNetWeighting
from .audited import AuditedWeights
from .base import Unweighted, Weighting
from .oracle import DropFlipped, OracleWeights
from .sigmoid_prior import SigmoidPrior

__all__ = [
    "AuditedWeights",
    "DropFlipped",
    "OracleWeights",
    "SigmoidPrior",
    "Unweighted",
    "VNet",
    "VNetWeighting",
    "Weighting",
    "Weights",
]
