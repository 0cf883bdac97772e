"""LightningDataModules, and their sources, label noise, tokens and batches."""

from .hh import AnthropicHH as AnthropicHH
from .hh import HHCompletions as HHCompletions
from .hub import HubCompletions as HubCompletions
from .hub import HubPreferences as HubPreferences
from .hub import pairs_of as pairs_of
from .noise.base import LabelNoise as LabelNoise
from .noise.base import NoiseFromMask as NoiseFromMask
from .noise.base import SymmetricNoise as SymmetricNoise
from .noise.base import TwoRateNoise as TwoRateNoise
from .noise.groups import AnnotatorNoise as AnnotatorNoise
from .noise.groups import CategoryNoise as CategoryNoise
from .noise.preferences import NearTieNoise as NearTieNoise
from .noise.preferences import SpuriousPreferenceNoise as SpuriousPreferenceNoise
from .noise.preferences import TemperatureLabels as TemperatureLabels
from .preference import PreferenceDataModule as PreferenceDataModule
from .sft import SFTDataModule as SFTDataModule
from .sources import CompletionFiles as CompletionFiles
from .sources import EmbeddedWorld as EmbeddedWorld
from .sources import Files as Files
from .sources import Prompts as Prompts
from .sources import Source as Source
from .sources import WorldCompletions as WorldCompletions
from .tldr import TLDR as TLDR
from .tldr import TLDRCompletions as TLDRCompletions
