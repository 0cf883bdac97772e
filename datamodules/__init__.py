"""LightningDataModules, and their sources, label noise, tokens and batches."""

from .hh import AnthropicHH, HHCompletions
from .hub import HubCompletions, HubPreferences, pairs_of
from .noise.base import LabelNoise, NoiseFromMask, SymmetricNoise, TwoRateNoise
from .noise.groups import AnnotatorNoise, CategoryNoise
from .noise.preferences import NearTieNoise, SpuriousPreferenceNoise, TemperatureLabels
from .preference import PreferenceDataModule
from .sft import SFTDataModule
from .sources import CompletionFiles, EmbeddedWorld, Files, Prompts, Source, WorldCompletions
from .tldr import TLDR, TLDRCompletions

__all__ = [
    "TLDR",
    "AnnotatorNoise",
    "AnthropicHH",
    "CategoryNoise",
    "CompletionFiles",
    "EmbeddedWorld",
    "Files",
    "HHCompletions",
    "HubCompletions",
    "HubPreferences",
    "LabelNoise",
    "NearTieNoise",
    "NoiseFromMask",
    "PreferenceDataModule",
    "Prompts",
    "SFTDataModule",
    "Source",
    "SpuriousPreferenceNoise",
    "SymmetricNoise",
    "TLDRCompletions",
    "TemperatureLabels",
    "TwoRateNoise",
    "WorldCompletions",
    "pairs_of",
]
