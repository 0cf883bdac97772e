"""Implicit rewards of a pair: the difference u and the sum Delta (paper, sections 3.2 and 5.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .batch import LogProbs


@dataclass
class Rewards:
    """Implicit rewards beta log(pi / pi_ref) of N pairs, from summed log-probabilities in nats."""

    policy: LogProbs
    reference: LogProbs
    beta: float

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
