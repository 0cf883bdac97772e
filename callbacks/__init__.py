"""Lightning callbacks: what a run shows and writes down."""

from .checkpoint import RunCheckpoint
from .generations import GenerationWriter
from .gold import GoldReward
from .noise_mask import NoiseMask
from .samples import SampleResponses
from .snapshots import Snapshots
from .summary import RunSummary
from .throughput import Throughput, pairs_in, tokens_in
from .weights import WeightRecorder

__all__ = [
    "GenerationWriter",
    "GoldReward",
    "NoiseMask",
    "RunCheckpoint",
    "RunSummary",
    "SampleResponses",
    "Snapshots",
    "Throughput",
    "WeightRecorder",
    "pairs_in",
    "tokens_in",
]
