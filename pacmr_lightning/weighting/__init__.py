"""Weights of pairs: fixed, known or learned."""

from ..rewards import Weights as Weights
from .algorithm_1 import VNet as VNet
from .algorithm_1 import VNetWeighting as VNetWeighting
from .audited import AuditedWeights as AuditedWeights
from .base import Unweighted as Unweighted
from .base import Weighting as Weighting
from .oracle import DropFlipped as DropFlipped
from .oracle import OracleWeights as OracleWeights
from .sigmoid_prior import SigmoidPrior as SigmoidPrior
