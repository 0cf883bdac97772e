"""Where ``load_vnet`` was before it moved to ``pacmr_lightning.weighting.vnet_folder``."""

from .weighting.vnet_folder import load_vnet, save_vnet

__all__ = ["load_vnet", "save_vnet"]
