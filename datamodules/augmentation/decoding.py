"""How a translation is chosen: beam search, or sampling that depends on the text and not on its batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from pacmr_lightning.errors import UserError


@dataclass(frozen=True)
class Decoding:
    """Beam search, or with ``sample`` one draw a text.

    A draw depends on the seed and the text alone (up to rounding), so it is the same in every batch and
    order, and after a resume.

    Raises:
        UserError: a value is out of range, or has no effect beside ``sample``.
    """

    num_beams: int = 4
    """Beams of the search, at least 1."""
    sample: bool = False
    """Draw every token instead of searching."""
    temperature: float = 1.0
    """Of the draws, above 0."""
    top_p: float = 0.9
    """Tokens are drawn from the most probable ones that have this probability together, in (0, 1]."""
    seed: int = 42
    """Of the draws."""

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        idle = ("num_beams",) if self.sample else ("temperature", "top_p", "seed")
        for name in idle:
            value = getattr(self, name)
            if value != defaults[name]:
                raise UserError(
                    f"{name} is {value}, but it has no effect with sample {str(self.sample).lower()}; leave "
                    "one of them out."
                )
        if self.num_beams < 1:
            raise UserError(f"num_beams is {self.num_beams}, but at least 1 beam is needed.")
        if self.temperature <= 0:
            raise UserError(f"temperature is {self.temperature}, but it must be above 0.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, but it must lie in (0, 1].")

    @property
    def settings(self) -> dict[str, Any]:
        """What a result depends on, JSON-serialisable."""
        if not self.sample:
            return {"num_beams": self.num_beams}
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}

    def arguments(self, texts: Sequence[str]) -> dict[str, Any]:
        """What ``generate`` has to know for a batch of N texts, which name the draws."""
        if not self.sample:
            return {"do_sample": False, "num_beams": self.num_beams}
        # Not transformers' own sampling: it draws the tokens of a whole batch from one stream of numbers.
        processors: list[LogitsProcessor] = []
        if self.temperature != 1:
            processors.append(TemperatureLogitsWarper(self.temperature))
        if self.top_p < 1:
            processors.append(TopPLogitsWarper(self.top_p))
        processors.append(_GumbelNoise(texts, self.seed))
        return {"do_sample": False, "num_beams": 1, "logits_processor": LogitsProcessorList(processors)}


class _GumbelNoise(LogitsProcessor):
    """Adds Gumbel noise, under which the largest logit is a draw from the softmax; each text has its own."""

    def __init__(self, texts: Sequence[str], seed: int):
        self.generators = [torch.Generator().manual_seed(_seed(text, seed)) for text in texts]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        size = scores.shape[-1]
        # -log(E) of an exponential E is Gumbel. Drawn on the CPU, so that it is the same on every device.
        noise = torch.stack([-torch.empty(size).exponential_(generator=g).log() for g in self.generators])
        # To torch's types the sum is no longer a FloatTensor.
        return scores + noise.to(scores)  # type: ignore[return-value]


def _seed(text: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
