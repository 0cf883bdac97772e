"""The policy: a causal language model with a LoRA adapter, and the log-probabilities it gives."""

from .model import PolicyModel

__all__ = ["PolicyModel"]
