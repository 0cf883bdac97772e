"""PreferenceModule: policy + objective + weighting, trained by Algorithm 1 of the paper."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..batch import LogProbs, PairBatch, PairedBatch
from ..errors import UserError
from ..gradient import clip, norm
from ..metrics import REWARDS, Means, WeightStatistics, reward_values
from ..objectives import DPO, Objective
from ..policy import PolicyModel
from ..rewards import PairRecord
from ..strategies import check_adapter, check_precision, check_strategy, set_gradient
from ..weighting import Unweighted, Weighting
from ..weighting.base import check_soft_labels, check_update
from ..weighting.inner_gradient import inner_step
from ..weighting.kept_gradients import train_pairs
from ..weighting.shifted_parameters import check_shifted
from ..weighting.train_pairs import TrainPairs
from .datamodule import datamodule
from .finite import check_finite
from .preference_checkpoint import PreferenceCheckpoint
from .schedule import check_schedule, planned_updates, warmup_cosine

CURVES = 20
"""Numbers that an objective has learned (of annotators: hundreds, maybe) up to which they are logged."""


class PreferenceModule(PreferenceCheckpoint):
    """Trains a LoRA policy on preference pairs; every method is a choice of objective and weighting.

    One ``training_step`` is one policy update on a whole optimizer-step batch, which the module cuts into
    micro-batches itself; ``global_step`` counts policy updates.

    Args:
        policy: the model with its adapter; it is loaded when the trainer starts.
        objective: per-pair loss.
        weighting: how much each pair's loss counts.
        method: label of the run in its folder's name and its summary.
        learning_rate: peak learning rate of AdamW.
        betas: of AdamW.
        weight_decay: of AdamW.
        warmup_ratio: share of the updates in which the learning rate rises linearly from 0.
        min_lr_ratio: share of the peak that the cosine ends at.
        max_grad_norm: the policy's gradient is scaled down to this norm; None for no clipping.
        micro_batch_size: pairs in one forward pass, on each device; None for all of the device's share.
        max_new_tokens: of a response that ``predict`` generates (greedily).

    Raises:
        UserError: an argument is out of its range.
    """

    def __init__(
        self,
        policy: PolicyModel,
        objective: Objective | None = None,
        weighting: Weighting | None = None,
        method: str = "dpo",
        learning_rate: float = 5e-6,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_ratio: float = 0.03,
        min_lr_ratio: float = 0.1,
        max_grad_norm: float | None = 1.0,
        micro_batch_size: int | None = None,
        max_new_tokens: int = 128,
    ):
        super().__init__()
        check_schedule(learning_rate, warmup_ratio, min_lr_ratio)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UserError(f"max_grad_norm is {max_grad_norm}, but it must be above 0, or null for none.")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise UserError(f"micro_batch_size is {micro_batch_size}, but it must be at least 1, or null.")
        # From LightningCLI come plain values from which a checkpoint alone can build everything; from Python
        # come objects, which a checkpoint must not pickle.
        from_cli = _given_hyperparameters.get() is not None
        self.save_hyperparameters(ignore=() if from_cli else ("policy", "objective", "weighting"))
        self.policy = policy
        self.objective = objective or DPO()
        self.weighting = weighting or Unweighted()
        check_update(self.weighting)
        check_soft_labels(self.weighting, self.objective)
        if self.objective.grouped and not isinstance(self.weighting, Unweighted):
            raise UserError(
                f"{type(self.objective).__name__} weighs the pairs of a batch itself, so "
                f"{type(self.weighting).__name__} would have no effect; use Unweighted with it."
            )
        self.method = method
        self.learning_rate = learning_rate
        self.betas = betas
        self.weight_decay = weight_decay
        self.warmup_ratio = warmup_ratio
        self.min_lr_ratio = min_lr_ratio
        self.max_grad_norm = max_grad_norm
        self.micro_batch_size = micro_batch_size
        self.max_new_tokens = max_new_tokens
        self.automatic_optimization = False
        # Checkpoints hold the trainable parameters only; on_load_checkpoint checks that all are there.
        self.strict_loading = False

        # check_finite looks at what they are given.
        self.train_means = Means((*REWARDS, "grad_norm"), checked=False)
        self.weight_statistics = WeightStatistics()
        self.checked_pair: PairBatch | None = None
        self.options = {}
        # Of the last VNet update, until they are logged.
        self.outer_values = {}

    @property
    def vnet(self) -> torch.nn.Module | None:
        """VNet, where the weighting has one; no submodule, so that nothing casts, shards or steps it."""
        return self.weighting.vnet

    @property
    def vnet_optimizer(self) -> torch.optim.Optimizer | None:
        """VNet's optimizer, where the weighting has one."""
        return self.weighting.vnet_optimizer

    def configure_model(self) -> None:
        """Loads the policy; the second call does nothing."""
        self.policy.build(pair=self.checked_pair)

    def setup(self, stage: str) -> None:
        """Moves metrics and what the weighting learns to the device, before a restore; tells the noise rate.

        Raises:
            UserError: ``micro_batch_size`` does not divide a device's share of the global batch, the strategy
                cannot train an adapter, or there is no datamodule to fit.
        """
        check_strategy(self.trainer.strategy, self.policy.quantization)
        device = self.trainer.strategy.root_device
        self.weighting.to(device)
        self.weighting.set_optimizer(self.betas, self.weight_decay, self.max_grad_norm)
        # DeepSpeed moves no module whose parameters it keeps in parts, and so none of its metrics.
        for metrics in (self.train_means, self.weight_statistics, self.held_out_means):
            metrics.to(device)
        data = datamodule(self.trainer)
        if stage != "fit":
            return
        if data is None:
            raise UserError(
                "PreferenceModule needs a datamodule that pairs its batches; give fit a PreferenceDataModule."
            )
        self.weighting.set_label_noise(data.noise_rate, data.uniform_noise)
        for part in (self.weighting, self.objective):
            part.check_pairs(data.train_pairs)
        self.checked_pair = data.train_pairs.batch([0])
        if self.objective.label_noise == "auto":
            self.objective.resolve_label_noise(data.noise_rate)
        share = data.global_batch_size // self.trainer.world_size
        if self.micro_batch_size and share % self.micro_batch_size:
            raise UserError(
                f"micro_batch_size {self.micro_batch_size} does not divide the {share} pairs that a "
                "device gets for one step; choose a divisor."
            )
        self.options = self.fit_options()

    def on_fit_start(self) -> None:
        """Lets the datamodule ask the reference, which is on its device now, for what it keeps on disk.

        Raises:
            UserError: the trainer's precision turned the adapter into half precision; or the weighting
                cannot learn from parameters that ZeRO-3 keeps in parts.
        """
        check_adapter(self.policy.adapter())
        self.policy.reference_digest()  # which takes longer than a checkpoint should
        if self.policy.is_sharded:
            self.weighting.check_sharded()
        data = datamodule(self.trainer)
        if data is not None:
            data.fill_reference(self.policy)
            if self.weighting.every:
                check_shifted(self.policy, move_data_to_device(self.checked_pair, self.policy.device))

    def on_validation_start(self) -> None:
        """Checks that the policy can read the pairs, where no fit has done so.

        Raises:
            UserError: it cannot.
        """
        data = datamodule(self.trainer)
        if data is not None and not self.trainer.training:
            data.check_model(self.policy)

    on_test_start = on_validation_start

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW over the adapter; linear warm-up, then a cosine to ``min_lr_ratio`` of the peak."""
        optimizer = torch.optim.AdamW(
            self.policy.adapter().values(),
            lr=self.learning_rate,
            betas=self.betas,
            weight_decay=self.weight_decay,
        )
        updates = planned_updates(self.trainer)
        updates_per_epoch = len(datamodule(self.trainer).train_dataloader())
        self.objective.check_plan(updates, updates_per_epoch)
        self.weighting.check_plan(updates, updates_per_epoch)
        schedule = warmup_cosine(optimizer, updates, self.warmup_ratio, self.min_lr_ratio)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch: PairedBatch, batch_idx: int) -> dict[str, Any]:
        """One iteration of Algorithm 1: a VNet update where one is due, then one policy update."""
        train = batch.train
        # What a step does is a sum over pairs, except where an objective groups them as they come.
        if self.micro_batch_size is not None and not self.objective.grouped:
            train = train.longest_first()
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        assert not isinstance(optimizer, list) and isinstance(schedule, LRScheduler)
        train = train.with_reference(self._reference(train))
        # Lightning sets it without declaring it.
        log_every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        log_now = bool(log_every) and (self.global_step + 1) % log_every == 0
        every = self.weighting.every
        learns = bool(every and self.global_step % every == 0)
        pairs = train_pairs(
            self.policy,
            self.objective,
            train,
            self.micro_batch_size,
            often=learns,
            soft_labels=self.weighting.soft_labels,
            entropies=self.weighting.needs_entropies,
        )
        if learns:
            if batch.meta is None and self.weighting.needs_meta:
                raise UserError(
                    f"Policy update {self.global_step} is due for a VNet update (every {every}), but its "
                    "batch has no meta pairs; set the datamodule's meta_every to the weighting's every."
                )
            meta = train[:0] if batch.meta is None else batch.meta
            self.outer_values = self.weighting.update(pairs, meta, optimizer.param_groups[0]["lr"])

        # Line 13: weights under the new Theta, then one weighted update of the policy.
        record, gradient = self._weighted_gradient(pairs)
        self.train_means.update({"grad_norm": norm(gradient)})
        if self.max_grad_norm is not None:
            clip(gradient, self.max_grad_norm)
        set_gradient(self.trainer.strategy, self.policy.adapter(), gradient)
        optimizer.step()
        if batch_idx == 0:
            check_precision(optimizer, self.policy.adapter(), gradient)
        optimizer.zero_grad()
        self.policy.has_stepped = True
        schedule.step()
        if log_now:
            self._log_training()
        return {"record": record}

    def _weighted_gradient(self, pairs: TrainPairs) -> tuple[PairRecord, dict[str, Tensor]]:
        """Gradient of the weighted loss over the global batch, and what the step believed of each pair."""
        inner = inner_step(pairs, self.weighting)
        train, rewards = pairs.batch, pairs.rewards
        # Soft or not, the loss of a run's curve is that of the labels as observed.
        losses = pairs.losses if pairs.soft is None else self.objective(rewards)
        check_finite(losses, train.ids, inner.gradient)
        self.objective.observe(rewards, train.ids)
        self.weighting.observe(rewards, train)
        if self.objective.grouped:
            losses = self.objective.group_value(losses, self.micro_batch_size).expand_as(losses)
        self.train_means.update(reward_values(rewards, losses))
        self.weight_statistics.add(inner.weights, train.flipped)
        record = PairRecord(
            ids=train.ids,
            u=rewards.u,
            delta=rewards.delta,
            weight=inner.weights.g,
            a=inner.weights.a,
            b=inner.weights.b,
            flipped=train.flipped,
            features=inner.weights.features,
        )
        return record, inner.gradient

    def _reference(self, batch: PairBatch) -> LogProbs:
        if batch.reference is not None:
            return batch.reference
        return LogProbs.cat(
            [self.policy.reference_log_probs(part) for part in batch.micro_batches(self.micro_batch_size)]
        )

    def _log_training(self) -> None:
        values = self.train_means.compute() | self.weight_statistics.compute() | self.outer_values
        self.outer_values = {}
        shown = ("loss", "rewards/accuracies")
        self.log_dict({f"train/{name}": values.pop(name) for name in shown}, prog_bar=True)
        self.log_dict({f"train/{name}": value for name, value in values.items()})
        if len(learned := self.objective.learned()) <= CURVES:
            self.log_dict({f"train/{name}": value for name, value in learned.items()})
