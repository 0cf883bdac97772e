"""Weights of pairs: fixed, known or learned."""

from .algorithm_1 import VNetWeighting
from .audited import AuditedWeights
from .base import Unweighted, Weighting, Weights
from .oracle import DropFlipped, OracleWeights
from .sigmoid_prior import SigmoidPrior
from .vnet import VNet

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
