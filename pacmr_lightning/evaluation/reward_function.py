"""Rewards of responses, by which policies can be scored."""

from abc import ABC, abstractmethod


class RewardFunction(ABC):
    """Base of rewards: r(prompt, response) is higher for better responses."""

    @abstractmethod
    def __call__(self, prompt: str, response: str) -> float:
        """Return the reward of one response."""
