"""Trainer strategies for a LoRA policy: what Lightning's DeepSpeed strategy lacks, and ZeRO-3's parts."""

from .deepspeed import LoraDeepSpeedStrategy, check_precision, check_strategy, set_gradient

__all__ = ["LoraDeepSpeedStrategy", "check_precision", "check_strategy", "set_gradient"]
