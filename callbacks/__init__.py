"""Lightning callbacks: what a run shows and writes down."""

from .checkpoint import RunCheckpoint, Snapshots
from .generations import GenerationWriter
from .gold_reward import GoldReward
from .health import Health
from .log_progress import LogProgress
from .noise_mask import NoiseMask
from .samples import SampleResponses
from .sequence_kl import SequenceKL
from .summary import RunSummary
from .throughput import Throughput, pairs_in, tokens_in
from .vnet_surfaces import VNetSurfaces
from .weight_distributions import WeightDistributions
from .weight_gap import WeightGap
from .weights import WeightRecorder

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
    "pairs_in",
    "tokens_in",
]
