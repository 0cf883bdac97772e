"""Implicit reward margin u and sum Delta of a pair, and its weight g (Qu et al., sections 3.2 and 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .batch import UNKNOWN, LogProbs, PairBatch, Segment


@dataclass
class Rewards:
    """Implicit rewards beta log(pi / pi_ref) of N pairs, from summed log-probabilities in nats.

    >>> policy = LogProbs(chosen=torch.tensor([-10.0, -12.0]), rejected=torch.tensor([-15.0, -12.0]))
    >>> reference = LogProbs(torch.tensor([-12.0, -12.0]), torch.tensor([-14.0, -12.0]))
    >>> rewards = Rewards(policy, reference, beta=0.1)
    >>> rewards.u  # 0.1 (2 - -1)
    tensor([0.3000, 0.0000])
    >>> rewards.delta  # 0.1 (2 + -1)
    tensor([0.1000, 0.0000])
    """

    policy: LogProbs
    reference: LogProbs
    beta: float
    chosen_tokens: Tensor | None = None
    """(N,) int64 tokens of the chosen responses, EOS included; None if no objective needs them."""
    rejected_tokens: Tensor | None = None
    """(N,) int64, likewise."""
    annotators: list[str | None] | None = None
    """N annotators, None where unknown; None if all are unknown."""

    @classmethod
    def of(cls, policy: LogProbs, batch: PairBatch, beta: float) -> Rewards:
        """Return the rewards of a batch with reference log-probabilities."""
        assert batch.reference is not None
        chosen, rejected = ((batch.segment_ids == s).sum(1) for s in (Segment.CHOSEN, Segment.REJECTED))
        return cls(policy, batch.reference, beta, chosen, rejected, batch.annotators)

    def token_counts(self, option: str) -> tuple[Tensor, Tensor]:
        """Return the tokens of chosen and rejected; raises ValueError, with the option that needs them."""
        if self.chosen_tokens is None or self.rejected_tokens is None:
            raise ValueError(f"{option} needs the numbers of response tokens (see Rewards.of)")
        return self.chosen_tokens, self.rejected_tokens

    def detach(self) -> Rewards:
        """Return the same values outside the autograd graph."""
        return replace(self, policy=self.policy.detach())

    def exchanged(self) -> Rewards:
        """Return the pairs with chosen and rejected swapped, so that u is -u."""
        policy, reference = self.policy.exchanged(), self.reference.exchanged()
        counts = self.rejected_tokens, self.chosen_tokens
        return Rewards(policy, reference, self.beta, *counts, self.annotators)

    @staticmethod
    def cat(parts: Sequence[Rewards]) -> Rewards:
        """Concatenate micro-batches of one beta; all or none have token counts, or annotators."""
        counts = ([getattr(p, name) for p in parts] for name in ("chosen_tokens", "rejected_tokens"))
        chosen, rejected = (None if column[0] is None else torch.cat(column) for column in counts)
        policy = LogProbs.cat([p.policy for p in parts])
        reference = LogProbs.cat([p.reference for p in parts])
        annotators = [name for p in parts for name in p.annotators or ()] or None
        return Rewards(policy, reference, parts[0].beta, chosen, rejected, annotators)

    @property
    def h(self) -> Tensor:
        """(N,) log-ratio difference, without beta: log(pi / pi_ref) of chosen minus rejected."""
        chosen = self.policy.chosen - self.reference.chosen
        return chosen - (self.policy.rejected - self.reference.rejected)

    @property
    def chosen(self) -> Tensor:
        """(N,) implicit reward of the chosen responses."""
        return self.beta * (self.policy.chosen - self.reference.chosen)

    @property
    def rejected(self) -> Tensor:
        """(N,) implicit reward of the rejected responses."""
        return self.beta * (self.policy.rejected - self.reference.rejected)

    @property
    def u(self) -> Tensor:
        """(N,) implicit reward margin u(z)."""
        return self.chosen - self.rejected

    @property
    def delta(self) -> Tensor:
        """(N,) implicit reward sum Delta(z)."""
        return self.chosen + self.rejected


@dataclass
class Weights:
    """Weights g of N pairs, with slope a and offset b if there are any. No gradient."""

    g: Tensor
    """(N,), like a and b."""
    a: Tensor | None = None
    b: Tensor | None = None

    @staticmethod
    def cat(parts: list[Weights]) -> Weights:
        """Join consecutive micro-batches."""
        a, b = ([getattr(p, name) for p in parts] for name in ("a", "b"))
        joined = (None if column[0] is None else torch.cat(column) for column in (a, b))
        return Weights(torch.cat([p.g for p in parts]), *joined)


@dataclass
class PairRecord:
    """Detached values of a training step's N pairs, before its update; ``record`` of ``training_step``."""

    ids: list[str]
    u: Tensor
    """(N,) implicit reward margin."""
    delta: Tensor
    """(N,) implicit reward sum."""
    weight: Tensor
    """(N,) weight g."""
    a: Tensor | None
    """(N,) slope a(z), None if the weighting has none."""
    b: Tensor | None
    """(N,) offset b(z), None if the weighting has none."""
    flipped: Tensor
    """(N,) 1 flipped, 0 not flipped, -1 unknown."""


@dataclass
class Visits:
    """Records of the N pairs that were visited last, as arrays on the CPU."""

    u: np.ndarray
    """(N,), like the others."""
    delta: np.ndarray
    weight: np.ndarray
    flipped: np.ndarray
    """1 flipped, 0 not flipped, -1 unknown."""

    def by_flip(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Split (N,) values by "unflipped", "flipped" and "unknown"; "all" if all are unknown."""
        if (self.flipped == UNKNOWN).all():
            return {"all": values}
        groups = {"unflipped": 0, "flipped": 1, "unknown": UNKNOWN}
        parts = {name: values[self.flipped == flag] for name, flag in groups.items()}
        return {name: group for name, group in parts.items() if len(group)}
