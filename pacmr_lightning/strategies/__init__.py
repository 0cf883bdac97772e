"""Trainer strategies for a LoRA policy."""

from .deepspeed import LoraDeepSpeedStrategy, check_strategy, set_gradient

__all__ = ["LoraDeepSpeedStrategy", "check_strategy", "set_gradient"]
