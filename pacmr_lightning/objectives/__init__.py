"""Preference objectives."""

from .base import Objective
from .flip_rate import CDPO, RDPO, RPOEM, AnnotatorRPOEM, LabelNoiseObjective
from .grouped import DrDPO
from .per_pair import DPO, IPO, R3M, ROPO, HolderDPO

__all__ = [
    "CDPO",
    "DPO",
    "IPO",
    "R3M",
    "RDPO",
    "ROPO",
    "RPOEM",
    "AnnotatorRPOEM",
    "DrDPO",
    "HolderDPO",
    "LabelNoiseObjective",
    "Objective",
]
