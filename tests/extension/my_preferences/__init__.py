"""What docs/extending.md shows: one class of each kind that pacmr-lightning can be extended by."""

from .callback import LeastTrusted as LeastTrusted
from .estimator import OneSidedDifference as OneSidedDifference
from .noise import LengthBias as LengthBias
from .objective import SLiC as SLiC
from .outer import BrierConsistency as BrierConsistency
from .source import CsvPairs as CsvPairs
from .weighting import ConsensusWeights as ConsensusWeights
