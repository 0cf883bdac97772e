"""VNets that look at other features than (Delta, u): weightings of one's own (docs/extending.md).

    PYTHONPATH=. pacmr fit --config quickstart/preference --config research/aligner.yaml \\
      --model.policy.model MODEL --data.clean_meta Files --data.clean_meta.train clean.jsonl
    PYTHONPATH=. pacmr fit --config quickstart/preference --config research/metapo_style.yaml \\
      --model.policy.model MODEL --data.clean_meta Files --data.clean_meta.train clean.jsonl

Both are readings of methods without public code ("Aligner, Diagnose Thyself", ICLR 2026; MetaPO, Findings of
ACL 2026); results: research/notebook/vnet.md.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacmr_lightning.batch import PairBatch, Segment
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.strategies.ranks import on_all_ranks, sum_over_ranks
from pacmr_lightning.weighting import VNetWeighting

SCALE_DECAY, VISIT_DECAY = 0.95, 0.5
"""Share that the moments of features keep at a step, and those of a pair's u at its visit."""
LARGEST = 5.0
"""Standard deviations that features are clipped to."""
AT_ONCE = 4
"""Pairs of a forward pass for entropies."""


class FeatureNet(nn.Module):
    """g = sigmoid(b) of F features, standardised by exponential moments over the steps before."""

    weight: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, features: int, hidden: Sequence[int]):
        super().__init__()
        layers = [m for n, k in pairwise([features, *hidden]) for m in (nn.Linear(n, k), nn.ReLU())]
        last = nn.Linear(hidden[-1], 1)
        for each in (last.weight, last.bias):
            nn.init.zeros_(each)
        self.layers = nn.Sequential(*layers, last)
        self.register_buffer("weight", torch.zeros(()))
        for name in ("mean", "variance"):
            self.register_buffer(name, torch.zeros(features))

    def forward(self, *features: Tensor) -> tuple[Tensor, None, None]:
        """Return (N,) weights of (N,) values of each feature; there is no slope or offset."""
        deviation = self.variance.sqrt()
        known = deviation > 1e-6  # else constant up to rounding
        x = (torch.stack(features, dim=1).to(self.mean) - self.mean) / torch.where(known, deviation, 1)
        b = self.layers(torch.where(known, x, 0).clamp(-LARGEST, LARGEST)).squeeze(1)
        return torch.sigmoid(b), None, None

    @torch.no_grad()
    def observe(self, features: Sequence[Tensor]) -> None:
        """Update the moments by this rank's pairs of a step; all ranks call it."""
        x = torch.stack(list(features), dim=1).to(self.mean)
        sums = torch.cat([x.new_tensor([len(x)]), x.sum(0)])
        sum_over_ranks([sums])
        mean = sums[1:] / sums[0]
        squares = (x - mean).square().sum(0)
        sum_over_ranks([squares])
        self.weight.mul_(SCALE_DECAY).add_(1 - SCALE_DECAY)
        share, away = (1 - SCALE_DECAY) / self.weight, mean - self.mean
        self.variance.mul_(1 - share).add_(share * (squares / sums[0] + (1 - share) * away.square()))
        self.mean.add_(share * away)


class FeatureWeighting(VNetWeighting):
    """Base: VNet's training with a ``FeatureNet``; a subclass defines ``inputs`` and their number.

    Args:
        hidden: widths of the hidden layers.
        options: of ``VNetWeighting``.
    """

    count: int

    def __init__(self, hidden: Sequence[int] = (64,), **options: Any):
        super().__init__(hidden=hidden, **options)
        with torch.random.fork_rng(devices=[]):
            self.vnet: Any = FeatureNet(self.count, hidden)
        self.vnet_optimizer = torch.optim.Adam(self.vnet.parameters(), lr=self.learning_rate)

    @torch.no_grad()
    def observe(self, rewards: Rewards, batch: PairBatch) -> None:
        """Update the moments of the features."""
        self.vnet.observe(self.inputs(rewards, batch))


class AlignerWeights(FeatureWeighting):
    """Weights by perplexity difference, DPO loss and entropy; for ``AlignerModule``."""

    count = 3
    policy: PolicyModel

    def __init__(self, hidden: Sequence[int] = (64,), **options: Any):
        super().__init__(hidden, **options)
        self._known: dict[str, float] = {}
        """Entropies of this step's pairs, by id."""

    def inputs(self, rewards: Rewards, batch: PairBatch) -> list[Tensor]:
        """Return (N,) log perplexity of chosen minus rejected, DPO loss, and mean entropy over chosen."""
        assert rewards.chosen_tokens is not None and rewards.rejected_tokens is not None
        own = rewards.policy
        perplexity = own.rejected / rewards.rejected_tokens - own.chosen / rewards.chosen_tokens
        return [perplexity, -F.logsigmoid(rewards.u), self._entropies(batch).to(rewards.u.device)]

    @torch.no_grad()
    def _entropies(self, batch: PairBatch) -> Tensor:
        """(N,) mean entropy in nats of the next token over chosen responses, once a step for each pair."""
        known = self._known
        new = torch.tensor([i for i, name in enumerate(batch.ids) if name not in known], dtype=torch.long)
        for part in batch[new].micro_batches(AT_ONCE):
            seen = (part.segment_ids == Segment.PROMPT) | (part.segment_ids == Segment.CHOSEN)
            length = int(seen.sum(1).max())
            tokens = {"input_ids": part.input_ids[:, :length], "attention_mask": seen[:, :length].long()}
            log_p = self.policy.peft(**tokens).logits[:, :-1].float().log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            chosen = part.segment_ids[:, 1:length] == Segment.CHOSEN
            means = (entropy * chosen).sum(1) / chosen.sum(1)
            known.update(zip(part.ids, means.tolist(), strict=True))
        return torch.tensor([known[name] for name in batch.ids])

    def observe(self, rewards: Rewards, batch: PairBatch) -> None:
        """End the step: the policy moves, and with it the entropies."""
        super().observe(rewards, batch)
        self._known.clear()


class AlignerModule(PreferenceModule):
    """A PreferenceModule that gives ``AlignerWeights`` the policy."""

    def configure_model(self) -> None:
        """Load the policy, once."""
        super().configure_model()
        if not isinstance(self.weighting, AlignerWeights):
            raise UserError(f"AlignerModule needs AlignerWeights, not {type(self.weighting).__name__}.")
        self.weighting.policy = self.policy


class MetaPOWeights(FeatureWeighting):
    """Weights by the history of a pair's u: its evolution, its fluctuation, and abs(h)."""

    count = 3

    def __init__(self, hidden: Sequence[int] = (64,), **options: Any):
        super().__init__(hidden, **options)
        self._visits: dict[str, list[float]] = {}
        """First u, and exponential mean and variance of u over visits, by id; the same on all ranks."""

    def check_plan(self, updates: int, updates_per_epoch: int) -> None:
        """Refuse a run that visits no pair twice."""
        if updates <= updates_per_epoch:
            raise UserError(
                f"MetaPOWeights needs earlier visits of a pair, but in {updates} updates "
                f"({updates_per_epoch} an epoch) no pair is visited twice; set trainer.max_epochs to 2."
            )

    def inputs(self, rewards: Rewards, batch: PairBatch) -> list[Tensor]:
        """Return (N,) mean u minus the first, deviation of u, both with this visit, and abs(h)."""
        seen = [self._next(*visit) for visit in zip(batch.ids, rewards.u.tolist(), strict=True)]
        evolution = rewards.u.new_tensor([mean - first for first, mean, _ in seen])
        fluctuation = rewards.u.new_tensor([math.sqrt(variance) for *_, variance in seen])
        return [evolution, fluctuation, rewards.h.abs()]

    def _next(self, name: str, u: float) -> list[float]:
        first, mean, variance = self._visits.get(name, (u, u, 0.0))
        d = u - mean
        mean, variance = mean + (1 - VISIT_DECAY) * d, variance + (1 - VISIT_DECAY) * d * d
        return [first, mean, VISIT_DECAY * variance]

    def observe(self, rewards: Rewards, batch: PairBatch) -> None:
        """Record a visit of each pair of the step."""
        super().observe(rewards, batch)
        for name, u in on_all_ranks(list(zip(batch.ids, rewards.u.tolist(), strict=True))):
            self._visits[name] = self._next(name, u)

    def state_dict(self) -> dict[str, Any]:
        """Add the visits."""
        return {**super().state_dict(), "visits": self._visits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        super().load_state_dict(state)
        self._visits = dict(state["visits"])
