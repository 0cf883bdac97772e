"""LightningDataModules: sources, noise, rewordings, tokenization, paired batches."""

from .completions import CompletionFiles, WorldCompletions
from .hh import AnthropicHH, HHCompletions
from .hub import HubCompletions, HubPreferences
from .noise import LabelNoise
from .preference import PreferenceDataModule
from .sft import SFTDataModule
from .sources import EmbeddedWorld, Files, Source
from .tldr import TLDR, TLDRCompletions

__all__ = [
    "TLDR",
    "AnthropicHH",
    "CompletionFiles",
    "EmbeddedWorld",
    "Files",
    "HHCompletions",
    "HubCompletions",
    "HubPreferences",
    "LabelNoise",
    "PreferenceDataModule",
    "SFTDataModule",
    "Source",
    "TLDRCompletions",
    "WorldCompletions",
]
