"""Implicit rewards of a pair: the difference u and the sum Delta (paper, sections 3.2 and 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batch import LogProbs, PairBatch, Segment


@dataclass
class Rewards:
    """Implicit rewards beta log(pi / pi_ref) of N pairs, from summed log-probabilities in nats."""

    policy: LogProbs
    reference: LogProbs
    beta: float
    chosen_tokens: Tensor | None = None
    """(N,) int64 tokens of the chosen responses, EOS included; None where no objective needs them."""
    rejected_tokens: Tensor | None = None
    """(N,) int64 tokens of the rejected responses, EOS included."""
    annotators: list[str | None] | None = None
    """N names of those who gave the labels, None where unknown; None alone where all are."""

    @classmethod
    def of(cls, policy: LogProbs, batch: PairBatch, beta: float) -> Rewards:
        """Rewards of a batch's N pairs, which bring their reference log-probabilities, with token counts."""
        assert batch.reference is not None
        chosen, rejected = ((batch.segment_ids == s).sum(1) for s in (Segment.CHOSEN, Segment.REJECTED))
        return cls(policy, batch.reference, beta, chosen, rejected, batch.annotators)

    def detach(self) -> Rewards:
        """The same values outside the autograd graph."""
        return replace(self, policy=self.policy.detach())

    def exchanged(self) -> Rewards:
        """The same pairs under the other label: chosen and rejected have changed places, so u is -u."""
        return Rewards(
            self.policy.exchanged(),
            self.reference.exchanged(),
            self.beta,
            self.rejected_tokens,
            self.chosen_tokens,
            self.annotators,
        )

    @staticmethod
    def cat(parts: Sequence[Rewards]) -> Rewards:
        """Joins consecutive micro-batches of one beta; all or none have token counts, or annotators."""
        counts = ([getattr(p, name) for p in parts] for name in ("chosen_tokens", "rejected_tokens"))
        chosen, rejected = (None if column[0] is None else torch.cat(column) for column in counts)
        return Rewards(
            LogProbs.cat([p.policy for p in parts]),
            LogProbs.cat([p.reference for p in parts]),
            parts[0].beta,
            chosen,
            rejected,
            [name for p in parts for name in p.annotators or ()] or None,
        )

    @property
    def h(self) -> Tensor:
        """(N,) log-ratio difference, which beta does not scale: log(pi / pi_ref) of chosen minus rejected."""
        chosen = self.policy.chosen - self.reference.chosen
        return chosen - (self.policy.rejected - self.reference.rejected)

    @property
    def perplexity_difference(self) -> Tensor:
        """(N,) log perplexity of the chosen responses less that of the rejected ones, under the policy."""
        assert self.chosen_tokens is not None and self.rejected_tokens is not None
        return self.policy.rejected / self.rejected_tokens - self.policy.chosen / self.chosen_tokens

    @property
    def entropy(self) -> Tensor:
        """(N,) mean entropy of the policy's next token over the chosen responses, where it was asked for."""
        assert self.policy.entropies is not None and self.chosen_tokens is not None
        return self.policy.entropies.chosen / self.chosen_tokens

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
        """(N,) implicit reward difference u(z)."""
        return self.chosen - self.rejected

    @property
    def delta(self) -> Tensor:
        """(N,) implicit reward sum Delta(z)."""
        return self.chosen + self.rejected


@dataclass
class PairRecord:
    """What a training step believed of its N pairs, detached; ``training_step`` returns it as ``record``."""

    ids: list[str]
    u: Tensor
    """(N,) implicit reward difference before the update."""
    delta: Tensor
    """(N,) implicit reward sum before the update."""
    weight: Tensor
    """(N,) weight g, before any division by the mean."""
    a: Tensor | None
    """(N,) slope a(z), None where the weighting has none."""
    b: Tensor | None
    """(N,) offset b(z), None where the weighting has none."""
    flipped: Tensor
    """(N,) 1 flipped, 0 not flipped, -1 unknown."""
    features: Tensor | None = None
    """(N, F) what a VNet of other features than (Delta, u) weighs by; None for every other weighting."""
