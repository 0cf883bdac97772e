"""Trainer strategies for a LoRA policy."""

from .checks import check_strategy
from .deepspeed import LoraDeepSpeedStrategy, set_gradient

__all__ = ["LoraDeepSpeedStrategy", "check_strategy", "set_gradient"]
