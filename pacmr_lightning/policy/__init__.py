"""The policy: a causal language model with a LoRA adapter, and the log-probabilities it gives."""

from .model import Direction, PolicyModel

__all__ = ["Direction", "PolicyModel"]
