"""LightningDataModules: sources, noise, rewordings, tokenization, paired batches."""

from .completions import CompletionFiles, WorldCompletions
from .hh import AnthropicHH, HHCompletions
from .hub import HubCompletions, HubPreferences
from .preference import PreferenceDataModule
from .sft import SFTDataModule
from .sources import EmbeddedWorld, Files
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
    "PreferenceDataModule",
    "SFTDataModule",
    "TLDRCompletions",
    "WorldCompletions",
]
