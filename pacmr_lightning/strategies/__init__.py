"""Trainer strategies for a LoRA policy."""

from .checks import check_adapter, check_precision, check_strategy
from .deepspeed import LoraDeepSpeedStrategy, set_gradient

__all__ = ["LoraDeepSpeedStrategy", "check_adapter", "check_precision", "check_strategy", "set_gradient"]
