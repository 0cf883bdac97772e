"""Lightning callbacks: logs, figures, files, checkpoints and checks of a run."""

from .dashboard import Dashboard
from .generation_writer import GenerationWriter
from .health import Health
from .kl_guard import KLGuard
from .progress import LogProgress, Throughput
from .run_checkpoint import RunCheckpoint
from .run_summary import RunSummary
from .samples import GoldReward, SampleResponses, SequenceKL
from .weight_figures import VNetSurfaces, WeightDistributions
from .weight_gap import WeightGap
from .weights import NoiseMask, WeightRecorder

__all__ = [
    "Dashboard",
    "GenerationWriter",
    "GoldReward",
    "Health",
    "KLGuard",
    "LogProgress",
    "NoiseMask",
    "RunCheckpoint",
    "RunSummary",
    "SampleResponses",
    "SequenceKL",
    "Throughput",
    "VNetSurfaces",
    "WeightDistributions",
    "WeightGap",
    "WeightRecorder",
]
