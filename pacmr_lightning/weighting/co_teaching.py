"""Two adapters on one base that weigh each other's pairs."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..batch import PairBatch
from ..errors import UserError
from ..gradient import Direction, clip, norm
from ..objectives import Objective
from ..policy import PolicyModel
from ..ranks import on_all_ranks, sum_over_ranks
from ..rewards import Rewards
from .base import Weighting, Weights
from .inner_gradient import inner_step
from .kept_gradients import train_pairs
from .train_pairs import TrainPairs


class PeerWeights(Weighting):
    """Weights that another adapter on the same base gives, which learns from the same batches.

    The policy is the first adapter, which a run reports and exports. The second one starts from A matrices of
    its own and is trained like the first one, with weights that come from that one as it is before the step.
    It is kept here, and in checkpoints, and takes the first one's place in the LoRA layers while it runs.

    Pairs of no step (``WeightGap``'s probe set, an audit) have the weight that their rewards tell the other.
    """

    every = 1
    needs_meta = False

    def __init__(self) -> None:
        self._second: dict[str, nn.Parameter] = {}
        self._optimizer: torch.optim.AdamW | None = None
        # Of a checkpoint, until the first update, when the policy is on its device.
        self._saved: dict[str, dict[str, Any]] = {"adapter": {}, "optimizer": {}}
        self.updates = 0
        self.set_optimizer((0.9, 0.95), 0.0, 1.0)

    @abstractmethod
    def for_the_other(self, rewards: Rewards, objective: Objective, ids: list[str]) -> Tensor:
        """(N,) weights of this rank's pairs of a step for the adapter that does not have these rewards.

        Every rank calls it, with all of its pairs at once.
        """

    @abstractmethod
    def alone(self, rewards: Rewards) -> Tensor:
        """(N,) weights of pairs that are in no step."""

    def set_optimizer(
        self, betas: tuple[float, float], weight_decay: float, max_grad_norm: float | None
    ) -> None:
        """The second adapter's are the policy's; see ``Weighting``."""
        self._betas, self._weight_decay, self._max_grad_norm = betas, weight_decay, max_grad_norm

    def check_sharded(self) -> None:
        """Refuses ZeRO-3, which has no place for the second adapter's parts."""
        raise UserError(
            f"{type(self).__name__} trains a second adapter, whose parameters ZeRO-3 would not know; use "
            "configs/strategies/zero2.yaml or ddp.yaml."
        )

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """(N,) weights that the batch brings from ``update``; see above for pairs of no step."""
        return Weights(self.alone(rewards) if batch.weight is None else batch.weight)

    def update(self, pairs: TrainPairs, meta: PairBatch, learning_rate: float) -> dict[str, Tensor]:
        """One step of the second adapter; gives the pairs the weights under which the first one learns.

        Raises:
            UserError: the second adapter's gradient is not finite.
        """
        policy, batch = pairs.policy, pairs.batch
        self._build(policy)
        weight = self.for_the_other(pairs.rewards, pairs.objective, batch.ids)
        with _in_place(policy, self._second):
            weighed = replace(batch, weight=weight)
            others = train_pairs(policy, pairs.objective, weighed, pairs.micro_batch_size, often=True)
            gradient = inner_step(others, self).gradient
        # The step's weights travel with its pairs, however they are cut.
        pairs.batch = replace(batch, weight=self.for_the_other(others.rewards, pairs.objective, batch.ids))
        size = norm(gradient)
        if not torch.isfinite(size):  # the same on all ranks
            what = "The gradient of co-teaching's second adapter is not a finite number"
            raise UserError(f"{what}; lower the learning rate, or use float32.")
        self._step(gradient, learning_rate)
        self.updates += 1
        same = ((pairs.rewards.u > 0) == (others.rewards.u > 0)).to(size)
        counts = torch.stack([same.sum(), torch.ones_like(same).sum()])
        sum_over_ranks([counts])
        return {"peer/grad_norm": size, "peer/agreement": counts[0] / counts[1]}

    def _build(self, policy: PolicyModel) -> None:
        """Makes the second adapter where the policy is, anew or as saved; does nothing the second time."""
        if self._second:
            return
        first = policy.adapter()
        # Drawn from the first one's, which follow the run's seed and are the same on all ranks.
        start = next(iter(first.values())).detach().cpu().numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(start).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in first.items():
            value = torch.zeros(parameter.shape, dtype=parameter.dtype)
            if name in self._saved["adapter"]:
                value.copy_(self._saved["adapter"][name])
            elif ".lora_A." in name:  # PEFT's default; B is 0 in both
                nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            self._second[name] = nn.Parameter(value.to(parameter.device))
        second = self._second.values()
        self._optimizer = torch.optim.AdamW(second, betas=self._betas, weight_decay=self._weight_decay)
        if self._saved["optimizer"]:
            self._optimizer.load_state_dict(self._saved["optimizer"])
            # These options are the fit's, which may resume with others.
            self._optimizer.param_groups[0] |= {"betas": self._betas, "weight_decay": self._weight_decay}
        self._saved = {"adapter": {}, "optimizer": {}}

    def _step(self, gradient: Direction, learning_rate: float) -> None:
        if self._max_grad_norm is not None:
            clip(gradient, self._max_grad_norm)
        assert self._optimizer is not None
        self._optimizer.param_groups[0]["lr"] = learning_rate
        for name, parameter in self._second.items():
            parameter.grad = gradient[name]
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The second adapter, its optimizer, and the updates so far."""
        if self._optimizer is None:
            return {**self._saved, "updates": self.updates}
        adapter = {name: parameter.detach().clone() for name, parameter in self._second.items()}
        return {"adapter": adapter, "optimizer": self._optimizer.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps it for the next update."""
        self._saved = {name: state[name] for name in ("adapter", "optimizer")}
        self.updates = state["updates"]
        self._second, self._optimizer = {}, None


class CoTeaching(PeerWeights):
    """Each adapter learns from the pairs of a step that have the smallest loss under the other one.

    Co-teaching (arXiv 1804.06872), on the pairs of all ranks together: at update t the share R(t) = 1 - rate
    min(t / warmup, 1) is kept, rounded down but at least one pair, and of equal losses those with the
    smaller ids.

    Args:
        rate: share of the pairs that is left out in the end, in [0, 1); "auto": the datamodule's noise rate.
        warmup: policy updates until so many are.
        mean_one: divide the weights of a batch, 1 and 0, by their mean: a mean over the kept pairs.

    Raises:
        UserError: the rate is not in [0, 1), or warmup is negative.
    """

    def __init__(self, rate: float | Literal["auto"] = "auto", warmup: int = 100, mean_one: bool = True):
        super().__init__()
        if rate != "auto" and not 0 <= rate < 1:
            raise UserError(f"rate is {rate}, but co-teaching leaves a share in [0, 1) of the pairs out.")
        if warmup < 0:
            raise UserError(f"warmup is {warmup}, but it is a number of policy updates, 0 or more.")
        self.rate = rate
        self.warmup = warmup
        self.mean_one = mean_one
        # The smallest u that the last choice has kept.
        self._least_u = -math.inf

    def set_label_noise(self, rate: float, uniform: bool = True) -> None:
        """Resolves the rate "auto"."""
        if self.rate == "auto":
            self.rate = rate

    def check_plan(self, updates: int, updates_per_epoch: int) -> None:
        """Refuses a rate of 0, with which both adapters learn from all pairs. See ``Weighting``."""
        if self.rate == 0:
            raise UserError(
                "The rate of CoTeaching is 0, with which two adapters learn from all pairs, each for itself; "
                "give the share of wrong labels, such as --model.weighting.rate 0.2 (auto is the share that "
                "noise flips, and none is flipped here)."
            )

    def keep_rate(self) -> float:
        """R(t), the share that the current update keeps.

        Raises:
            UserError: the rate is "auto" and nobody has told it.
        """
        if self.rate == "auto":
            raise UserError("The rate of CoTeaching is auto, and no datamodule has told it; give a number.")
        done = min(self.updates / self.warmup, 1.0) if self.warmup else 1.0
        return 1 - self.rate * done

    def for_the_other(self, rewards: Rewards, objective: Objective, ids: list[str]) -> Tensor:
        """(N,) 1 for pairs that are kept, else 0."""
        found = zip(objective(rewards).tolist(), ids, rewards.u.tolist(), strict=True)
        by_loss = sorted(on_all_ranks(list(found)))
        # 1 - 0.9 of ten pairs is one pair, whatever its last bit.
        kept = by_loss[: max(1, int(self.keep_rate() * len(by_loss) + 1e-6))]
        self._least_u = min(u for *_, u in kept)
        names = {name for _, name, _ in kept}
        return rewards.u.new_tensor([float(name in names) for name in ids])

    def alone(self, rewards: Rewards) -> Tensor:
        """(N,) 1 from the smallest u on that the last choice has kept, else 0."""
        return (rewards.u >= self._least_u).to(rewards.u)

    def state_dict(self) -> dict[str, Any]:
        """With the rate, which "auto" may have set, and what the last choice has kept."""
        return {**super().state_dict(), "rate": self.rate, "least_u": self._least_u}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        super().load_state_dict(state)
        self.rate, self._least_u = state["rate"], state["least_u"]


class PeerPrior(PeerWeights):
    """g = sigmoid(u) with the other adapter's u, where the fixed prior has the policy's own.

    Args:
        mean_one: divide the weights of a batch by their mean.
    """

    def __init__(self, mean_one: bool = False):
        super().__init__()
        self.mean_one = mean_one

    def for_the_other(self, rewards: Rewards, objective: Objective, ids: list[str]) -> Tensor:
        """(N,) sigmoid(u)."""
        return self.alone(rewards)

    def alone(self, rewards: Rewards) -> Tensor:
        """(N,) sigmoid(u)."""
        return torch.sigmoid(rewards.u)


@contextmanager
def _in_place(policy: PolicyModel, second: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside, the policy's LoRA layers have the second adapter's matrices; the first one's stay as they are.

    PEFT's own second adapter would be part of the model, and cast, sharded, gathered and saved with it.
    """
    linears, first = policy.lora_linears(), policy.adapter()
    try:
        for name, linear in linears.items():
            linear.weight = second[name]
        yield
    finally:
        for name, linear in linears.items():
            linear.weight = first[name]
