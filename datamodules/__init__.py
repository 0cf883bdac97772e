"""LightningDataModules: sources, noise, rewordings, tokenization, paired batches."""

from .completions import CompletionFiles, WorldCompletions
from .preference import PreferenceDataModule
from .sft import SFTDataModule
from .sources import EmbeddedWorld, Files

__all__ = [
    "CompletionFiles",
    "EmbeddedWorld",
    "Files",
    "PreferenceDataModule",
    "SFTDataModule",
    "WorldCompletions",
]
