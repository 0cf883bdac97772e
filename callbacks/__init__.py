"""Lightning callbacks: what a run shows and writes down."""

from .checkpoint import RunCheckpoint, Snapshots
from .figures import VNetSurfaces, WeightDistributions
from .generations import GenerationWriter
from .health import Health
from .progress import LogProgress, Throughput
from .samples import GoldReward, SampleResponses, SequenceKL
from .summary import RunSummary
from .weight_gap import WeightGap
from .weights import NoiseMask, WeightRecorder

__all__ = [
    "GenerationWriter",
    "GoldReward",
    "Health",
    "LogProgress",
    "NoiseMask",
    "RunCheckpoint",
    "RunSummary",
    "SampleResponses",
    "SequenceKL",
    "Snapshots",
    "Throughput",
    "VNetSurfaces",
    "WeightDistributions",
    "WeightGap",
    "WeightRecorder",
]
