"""Lightning callbacks: what a run shows and writes down."""

from .generations import GenerationWriter
from .gold import GoldReward
from .summary import RunSummary
from .throughput import Throughput, pairs_in, tokens_in
from .weights import WeightRecorder

__all__ = [
    "GenerationWriter",
    "GoldReward",
    "RunSummary",
    "Throughput",
    "WeightRecorder",
    "pairs_in",
    "tokens_in",
]
