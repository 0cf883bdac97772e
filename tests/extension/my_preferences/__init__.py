"""What docs/extending.md shows: one class of each kind that pacmr-lightning can be extended by."""

from .callback import LeastTrusted
from .estimator import OneSidedDifference
from .noise import LengthBias
from .objective import SLiC
from .objectives_in_full import HardPairs, SmallLoss
from .outer import BrierConsistency
from .source import CsvPairs
from .weighting import ConsensusWeights
from .weighting_in_full import CautiousConsensus

__all__ = [
    "BrierConsistency",
    "CautiousConsensus",
    "ConsensusWeights",
    "CsvPairs",
    "HardPairs",
    "LeastTrusted",
    "LengthBias",
    "OneSidedDifference",
    "SLiC",
    "SmallLoss",
]
