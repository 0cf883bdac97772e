"""The parts of Algorithm 1 that ``weighting.algorithm_1`` puts together: d_meta and c_i."""

from .estimators import CentralDifference as CentralDifference
from .estimators import GhostDotProduct as GhostDotProduct
from .estimators import MetaGradientEstimator as MetaGradientEstimator
from .outer_objectives import CleanPreference as CleanPreference
from .outer_objectives import OuterGradient as OuterGradient
from .outer_objectives import OuterObjective as OuterObjective
from .outer_objectives import PromptAugmentationConsistency as PromptAugmentationConsistency
from .outer_objectives import SoftPromptConsistency as SoftPromptConsistency
from .step_pairs import StepPairs as StepPairs
