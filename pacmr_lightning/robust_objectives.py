"""Where these classes were before they moved to ``pacmr_lightning.objectives``; old configs name them so."""

from .objectives import ROPO, RPOEM, DrDPO

__all__ = ["ROPO", "RPOEM", "DrDPO"]
