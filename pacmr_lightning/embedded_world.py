"""A synthetic preference benchmark in text with known preference probabilities.

A prompt names a topic and a mood, a response is four attribute words, and a gold reward scores their fit.
Each topic and mood has two wordings, so a prompt has an exact augmentation A(x) (Qu et al., section 4) with
the same gold reward. The Bradley-Terry probability eta = sigmoid(r_chosen - r_rejected) is known, and with it
the posterior of a flipped label and the oracle weights of Qu et al., appendix D.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np

from .errors import UserError, check_at_least

TOPICS = (
    *(("ocean", "sea"), ("forest", "woods"), ("city", "metropolis")),
    *(("mountain", "peak"), ("house", "home"), ("storm", "tempest")),
)
MOODS = (
    *(("calm", "peaceful"), ("happy", "cheerful"), ("sad", "sorrowful")),
    *(("tense", "nervous"), ("tender", "loving"), ("strange", "mysterious")),
)
"""Both wordings of each mood; all take the article "a"."""
ATTRIBUTES = (
    *("bright", "cold", "deep", "distant", "fading", "gentle", "golden", "heavy"),
    *("hidden", "hollow", "quiet", "restless", "silver", "soft", "vast", "wild"),
)
RESPONSE_WORDS = 4
SPREAD = 1.6
"""Standard deviation over 16 attributes: labels follow the gold reward with a mean probability of 0.87."""

_TABLES, _PREFERENCES, _SFT = range(3)
"""Random streams, so that rows and rewards of one seed are independent."""


@dataclass(frozen=True)
class World:
    """Prompts, responses and gold rewards of the synthetic benchmark, the same for a seed on every machine.

    A random response has a mean reward of 0 for every prompt. The first k of n rows are the same for every n.

    Args:
        seed: of the gold rewards; prompts and responses use the same words for every seed.

    Raises:
        UserError: the seed is negative.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        self._generator(_TABLES, 0)

    @property
    def key(self) -> str:
        """A cache key that changes whenever the same arguments may give other rows."""
        code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        return f"{code}:{np.__version__}:{self.seed}"

    @cached_property
    def rewards(self) -> np.ndarray:
        """(6, 6, 16) reward of each attribute by topic and mood, with standard deviation ``SPREAD``."""
        rng = self._generator(_TABLES, 0)
        topics = rng.standard_normal((len(TOPICS), 1, len(ATTRIBUTES)))
        moods = rng.standard_normal((1, len(MOODS), len(ATTRIBUTES)))
        # A sum, so that what is learned of a topic helps in all moods.
        table = topics + moods
        table = table - table.mean(-1, keepdims=True)
        return SPREAD * table / table.std(-1, keepdims=True)

    def prompts(self) -> list[str]:
        """All 144 prompts, in a fixed order."""
        return list(_MEANINGS)

    def reword(self, prompt: str) -> str:
        """Return the exact augmentation A(x), with synonyms of topic and mood. A(A(x)) = x."""
        topic, topic_wording, mood, mood_wording = _meaning(prompt)
        return _prompt(topic, 1 - topic_wording, mood, 1 - mood_wording)

    def gold_reward(self, prompt: str, response: str) -> float:
        """Return the gold reward r(x, y), the sum over the first four words of the response.

        Words that are repeated or no attributes count 0. An unknown prompt raises UserError.
        """
        topic, _, mood, _ = _meaning(prompt)
        attributes = {_INDEX[word] for word in response.split()[:RESPONSE_WORDS] if word in _INDEX}
        return self._score(topic, mood, attributes)

    def preference_rows(self, n: int, seed: int) -> Iterator[dict[str, str | float]]:
        """Yield n pairs of different random responses with clean labels, drawn from the gold reward.

        ``eta`` is the probability that ``chosen`` beats ``rejected`` and may be under 0.5; ``category`` is
        the topic.
        """
        rng = self._generator(_PREFERENCES, seed)
        for i in range(n):
            topic, _, mood, _ = meaning = _draw_meaning(rng)
            first, second = self._draw_response(rng), self._draw_response(rng)
            while set(first) == set(second):
                second = self._draw_response(rng)
            better = self._score(topic, mood, first) - self._score(topic, mood, second)
            eta = 0.5 * (1 + math.tanh(better / 2))  # sigmoid(better), without overflow
            chosen, rejected, eta = (first, second, eta) if rng.random() < eta else (second, first, 1 - eta)
            prompt = _prompt(*meaning)
            yield {
                "id": f"world-{seed}-{i}",
                "prompt": prompt,
                "chosen": _text(chosen),
                "rejected": _text(rejected),
                "augmented_prompt": self.reword(prompt),
                "category": TOPICS[topic][0],
                "eta": eta,
            }

    def sft_rows(self, n: int, seed: int, best_of: int = 4) -> Iterator[dict[str, str]]:
        """Yield n demonstrations, each the best of ``best_of`` random responses by gold reward."""
        rng = self._generator(_SFT, seed)
        for _ in range(n):
            topic, _, mood, _ = meaning = _draw_meaning(rng)
            candidates = [self._draw_response(rng) for _ in range(best_of)]
            best = max(candidates, key=lambda response: self._score(topic, mood, response))
            yield {"prompt": _prompt(*meaning), "completion": _text(best)}

    def _generator(self, stream: int, seed: int) -> np.random.Generator:
        check_at_least(0, **{"The seed of the synthetic benchmark": min(self.seed, seed)})
        return np.random.Generator(np.random.PCG64([self.seed, stream, seed]))

    @staticmethod
    def _draw_response(rng: np.random.Generator) -> tuple[int, ...]:
        return tuple(rng.permutation(len(ATTRIBUTES))[:RESPONSE_WORDS].tolist())

    @cached_property
    def _rewards(self) -> list[list[list[float]]]:
        # Single numbers are read much faster from lists than from an array.
        return self.rewards.tolist()

    def _score(self, topic: int, mood: int, attributes: Iterable[int]) -> float:
        rewards = self._rewards[topic][mood]
        # fsum, because a plain sum depends on the order in its last digits.
        return math.fsum(rewards[a] for a in attributes)


def _prompt(topic: int, topic_wording: int, mood: int, mood_wording: int) -> str:
    return f"Describe the {TOPICS[topic][topic_wording]} in a {MOODS[mood][mood_wording]} mood:"


_MEANINGS = {
    _prompt(*meaning): meaning
    for meaning in product(range(len(TOPICS)), range(len(TOPICS[0])), range(len(MOODS)), range(len(MOODS[0])))
}
_INDEX = {word: i for i, word in enumerate(ATTRIBUTES)}


def _meaning(prompt: str) -> tuple[int, int, int, int]:
    meaning = _MEANINGS.get(prompt.strip())
    if meaning is None:
        raise UserError(
            f"The prompt {prompt[:80]!r} is not of the synthetic benchmark; "
            f"write it like {next(iter(_MEANINGS))!r}, with one of its topics and moods."
        )
    return meaning


def _draw_meaning(rng: np.random.Generator) -> tuple[int, int, int, int]:
    sizes = (len(TOPICS), len(TOPICS[0]), len(MOODS), len(MOODS[0]))
    topic, topic_wording, mood, mood_wording = (int(rng.integers(k)) for k in sizes)
    return topic, topic_wording, mood, mood_wording


def _text(response: tuple[int, ...]) -> str:
    return "".join(f" {ATTRIBUTES[a]}" for a in response)
