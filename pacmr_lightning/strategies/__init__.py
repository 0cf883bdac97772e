"""Trainer strategies for a LoRA policy."""

from .deepspeed import LoraDeepSpeedStrategy as LoraDeepSpeedStrategy
from .deepspeed import check_strategy as check_strategy
from .deepspeed import set_gradient as set_gradient
