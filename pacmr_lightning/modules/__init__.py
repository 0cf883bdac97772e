"""LightningModules."""

from .preference import PreferenceModule
from .sft import SFTModule

__all__ = ["PreferenceModule", "SFTModule"]
