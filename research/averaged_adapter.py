"""PACMR-DPO with rewards of an average of its adapters: does it confirm its own mistakes less?

    PYTHONPATH=. pacmr fit --config quickstart/preference --config methods/pacmr \\
      --model.policy.model MODEL --model.objective.beta 2 \\
      --model.weighting research.averaged_adapter.AveragedAdapter \\
      --model.weighting.outer research.averaged_adapter.AveragedPseudoLabels

A custom weighting and outer objective (docs/extending.md), evaluated in
research/notebook/changes-to-pacmr.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pacmr_lightning.batch import LogProbs, PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.gradient import Direction
from pacmr_lightning.meta_gradient import PromptAugmentationConsistency, StepPairs
from pacmr_lightning.meta_gradient.virtual_step import shifted
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import VNetWeighting, Weights
from pacmr_lightning.weighting.features import PAPER
from pacmr_lightning.weighting.weighted_gradient import WeightedGradient


class AveragedPseudoLabels(PromptAugmentationConsistency):
    """Qu et al.'s outer objective with ``AveragedAdapter``'s pseudo-labels, from before the virtual step."""

    believed: Tensor | None = None
    """(M,) u of the meta-batch, in the order in which they are run."""

    def targets(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of confident pairs, and their labels."""
        if self.believed is None:
            raise UserError("AveragedPseudoLabels needs the weighting AveragedAdapter, which averages.")
        return super().targets(self.believed)


class AveragedAdapter(VNetWeighting):
    """Weights sigmoid(a u + b) with u, and the sum Delta, of an exponential moving average of the adapters.

    Args:
        decay: weight of the old average at each policy update, in [0, 1).
        learn_every: policy updates between two VNet updates.
        options: of ``VNetWeighting``; features are those of Qu et al..

    Raises:
        UserError: an argument is out of its range.
    """

    every = 1

    def __init__(self, decay: float = 0.95, learn_every: int = 10, **options: Any):
        if not 0 <= decay < 1 or learn_every < 1:
            raise UserError(
                f"decay is {decay} and learn_every {learn_every}, but they are in [0, 1), and 1 or more."
            )
        super().__init__(every=1, **options)
        if self.vnet.features != PAPER:
            raise UserError("AveragedAdapter weighs by delta and u alone; leave features out.")
        self.decay = decay
        self.learn_every = learn_every
        self._mean: Direction = {}
        self._done = 0
        self._believed: tuple[list[str], Rewards] | None = None
        self._logged: dict[str, Tensor] = {}

    def check_sharded(self) -> None:
        """Refuse ZeRO-3, which shards parameters."""
        raise UserError(
            "AveragedAdapter averages whole parameters; use configs/strategies/zero2.yaml or ddp.yaml."
        )

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Return weights by the average's rewards of a step's pairs, by the policy's for others."""
        if self._believed is None:
            return super().weights(rewards, batch)
        ids, believed = self._believed
        rows = torch.tensor([ids.index(name) for name in batch.ids])
        return super().weights(Rewards(believed.policy[rows], believed.reference[rows], believed.beta), batch)

    def update(
        self, pairs: StepPairs, meta: PairBatch, learning_rate: float, peak: float
    ) -> dict[str, Tensor]:
        """Update the average, compute its log-probabilities, and train VNet if due."""
        due = self._done % self.learn_every == 0
        believed = replace(pairs.rewards, policy=self._ask(pairs, meta if due else None))
        self._believed = pairs.batch.ids, believed
        if due:
            self._logged = super().update(pairs, meta, learning_rate, peak)
        self._done += 1
        return self._logged

    def observe(self, rewards: Rewards, batch: PairBatch) -> None:
        """End the step: later pairs are of no step."""
        super().observe(rewards, batch)
        self._believed = None

    @torch.no_grad()
    def _ask(self, pairs: StepPairs, meta: PairBatch | None) -> LogProbs:
        """Update the average; return its log-probabilities of the train pairs, and set the meta-batch's u."""
        policy = pairs.policy
        now = {name: parameter.detach() for name, parameter in policy.adapter().items()}
        self._mean = {
            name: self._mean.get(name, value).to(value).lerp(value, 1 - self.decay)
            for name, value in now.items()
        }
        with shifted(policy, {name: mean - now[name] for name, mean in self._mean.items()}, 1.0):
            if meta is not None and isinstance(self.outer, AveragedPseudoLabels):
                size = pairs.micro_batch_size or len(pairs.batch)
                parts = meta.longest_first().micro_batches(size)  # as they will be run
                asked = [(policy.log_probs(part), policy.reference_log_probs(part)) for part in parts]
                self.outer.believed = torch.cat([Rewards(*both, pairs.objective.beta).u for both in asked])
            return LogProbs.cat([policy.log_probs(part) for part in pairs.micro_batches()])

    def _step(self, inner: WeightedGradient, features: list[Tensor], c: Tensor) -> None:
        assert self._believed is not None
        _, believed = self._believed
        super()._step(inner, [believed.delta, believed.u], c)

    def state_dict(self) -> dict[str, Any]:
        """Add the average."""
        return {**super().state_dict(), "mean": dict(self._mean), "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        super().load_state_dict(state)
        self._mean, self._done = dict(state["mean"]), state["done"]
