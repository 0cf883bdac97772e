"""LightningModules."""

from .preference import PreferenceModule as PreferenceModule
from .sft import SFTModule as SFTModule
