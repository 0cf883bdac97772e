"""PACMR-DPO that believes an average of its adapters: does it confirm its own mistakes less?

    PYTHONPATH=examples pacmr fit --config quickstart/preference --config methods/pacmr \\
      --model.policy.model MODEL --model.objective.beta 2 \\
      --model.weighting averaged_adapter.AveragedAdapter \\
      --model.weighting.outer averaged_adapter.AveragedPseudoLabels

A weighting and an outer objective of one's own (docs/extending.md); docs/results.md has what came of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pacmr_lightning.batch import LogProbs, PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.gradient import Direction
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import PromptAugmentationConsistency, TrainPairs, VNetWeighting, Weights
from pacmr_lightning.weighting.shifted_parameters import shifted


class AveragedPseudoLabels(PromptAugmentationConsistency):
    """The paper's outer objective with pseudo-labels of the averaged adapter, for ``AveragedAdapter``."""

    believed: Tensor | None = None
    """(M,) u of the meta pairs, in the order in which they are run."""

    def targets(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Confident pairs and their labels."""
        assert self.believed is not None, "AveragedAdapter sets it"
        return super().targets(self.believed)


class AveragedAdapter(VNetWeighting):
    """Weights sigmoid(a u + b) with u, and the sum Delta, of an exponential moving average of the adapters.

    Args:
        decay: what the average keeps at each policy update, in [0, 1).
        learn_every: policy updates between two VNet updates.
        options: of ``VNetWeighting``.

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
        self.decay = decay
        self.learn_every = learn_every
        self._mean: Direction = {}
        self._done = 0
        self._believed: Rewards | None = None

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Those that a step's pairs bring; pairs of no step have the weight that their rewards tell VNet."""
        return super().weights(rewards, batch) if batch.weight is None else Weights(batch.weight)

    def update(self, pairs: TrainPairs, meta: PairBatch, learning_rate: float) -> dict[str, Tensor]:
        """Averages, asks the average about the pairs, and learns where it is due."""
        self._believed = replace(pairs.rewards, policy=self._ask(pairs, meta))
        batch, metrics = pairs.batch, {}
        if self._done % self.learn_every == 0:
            pairs.batch = replace(batch, weight=super().weights(self._believed, batch).g)
            metrics = super().update(pairs, meta, learning_rate)
        # The step's weights travel with its pairs, however they are cut.
        pairs.batch = replace(batch, weight=super().weights(self._believed, batch).g)
        self._done += 1
        return metrics

    @torch.no_grad()
    def _ask(self, pairs: TrainPairs, meta: PairBatch) -> LogProbs:
        """Moves the average; its log-probabilities of the train pairs, and its u of the meta pairs."""
        policy = pairs.policy
        now = {name: parameter.detach() for name, parameter in policy.adapter().items()}
        self._mean = self._mean or {name: value.clone() for name, value in now.items()}
        for name, mean in self._mean.items():
            mean.lerp_(now[name], 1 - self.decay)
        with shifted(policy, {name: mean - now[name] for name, mean in self._mean.items()}, 1.0):
            if isinstance(self.outer, AveragedPseudoLabels):
                size = pairs.micro_batch_size or len(pairs.batch)
                parts = meta.longest_first().micro_batches(size)  # as they will be run
                asked = [(policy.log_probs(part), policy.reference_log_probs(part)) for part in parts]
                self.outer.believed = torch.cat([Rewards(*both, pairs.objective.beta).u for both in asked])
            return LogProbs.cat([policy.log_probs(part) for part in pairs.micro_batches()])

    def _step(self, inner: Any, features: list[Tensor], coefficients: Tensor) -> dict[str, Tensor]:
        """With what the average believes; c is the policy's own."""
        assert self._believed is not None
        return super()._step(inner, [self._believed.delta, self._believed.u], coefficients)

    def state_dict(self) -> dict[str, Any]:
        """With the average."""
        return {**super().state_dict(), "mean": dict(self._mean), "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        super().load_state_dict(state)
        self._mean, self._done = dict(state["mean"]), state["done"]
