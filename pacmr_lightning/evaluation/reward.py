"""A known reward of responses, from which preferences can be drawn and by which policies can be judged."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Reward(ABC):
    """r(prompt, response), a number that is higher for better responses."""

    name: str
    """What messages and files call it."""

    @abstractmethod
    def __call__(self, prompt: str, response: str) -> float:
        """The reward of one response."""
