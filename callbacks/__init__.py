"""Lightning callbacks: logs, figures, files, checkpoints and checks of a run."""

from .dashboard import Dashboard as Dashboard
from .generation_writer import GenerationWriter as GenerationWriter
from .health import Health as Health
from .kl_guard import KLGuard as KLGuard
from .progress import LogProgress as LogProgress
from .progress import Throughput as Throughput
from .run_checkpoint import RunCheckpoint as RunCheckpoint
from .run_summary import RunSummary as RunSummary
from .samples import GoldReward as GoldReward
from .samples import SampleResponses as SampleResponses
from .samples import SequenceKL as SequenceKL
from .weight_figures import VNetSurfaces as VNetSurfaces
from .weight_figures import WeightDistributions as WeightDistributions
from .weight_gap import WeightGap as WeightGap
from .weights import NoiseMask as NoiseMask
from .weights import WeightRecorder as WeightRecorder
