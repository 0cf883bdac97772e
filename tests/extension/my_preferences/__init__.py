"""What docs/extending.md shows: one class of each kind that pacmr-lightning can be extended by."""

from .callback import LeastTrusted
from .estimator import OneSidedDifference
from .noise import LengthBias
from .objective import SLiC
from .outer import BrierConsistency
from .source import CsvPairs
from .weighting import ConsensusWeights

__all__ = [
    "BrierConsistency",
    "ConsensusWeights",
    "CsvPairs",
    "LeastTrusted",
    "LengthBias",
    "OneSidedDifference",
    "SLiC",
]
