"""The policy: a causal language model with a LoRA adapter, and the log-probabilities it gives."""

from .model import Direction as Direction
from .model import PolicyModel as PolicyModel
