"""PreferenceModule: policy, objective and weighting, trained by Algorithm 1 of Qu et al."""

import math
from typing import Any, Literal

import torch
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..batch import MicroBatchSize, PairBatch, TokenBudget, TrainingBatch
from ..errors import UserError, check_at_least, check_is, check_within
from ..evaluation.generation import Decoding, respond
from ..evaluation.prompt_batch import PromptBatch, Response
from ..meta_gradient.step_pairs import StepPairs
from ..objectives import DPO, Objective
from ..policy import PolicyModel
from ..policy.base_model import check_savable, parameter_count
from ..rewards import PairRecord, Rewards
from ..strategies import check_strategy, set_gradient
from ..weighting import Unweighted, Weighting
from ..weighting.algorithm_1 import WeightedGradient, policy_gradient
from ..weighting.base import check_soft_labels, unused_columns
from .base import TrainedOnly, check_finite
from .metrics import GAP, REWARDS, RunningMeans, WeightStatistics, gold_accuracy, log_numbers, reward_values
from .micro_batch_finder import can_be_tried, chosen, fit_pairs
from .resumed_options import OPTIMIZER, check_options, flat_options, is_fitting, trainer_options
from .schedule import datamodule, learning_rate_by_size, log_short_run, planned_updates

_MICRO_BATCH = ("micro_batch_size", "micro_batch_tokens")
AUTO = 4
"""Pairs of a micro-batch where memory does not choose their number."""
CURVES = 20
"""Maximum count of an objective's learned values to log; there may be hundreds of annotators."""


class PreferenceModule(TrainedOnly):
    """Train a LoRA policy on preference pairs; a method is a choice of objective and weighting.

    One ``training_step`` is one policy update on a whole optimizer-step batch, which the module cuts into
    micro-batches; ``global_step`` counts policy updates.

    The module owns two optimizers: the policy's AdamW, from ``configure_optimizers``, and ``vnet_optimizer``
    if there is a VNet. ``lr-VNet`` and ``lr-VNet-updates`` are logged beside the policy's learning rate.

    Args:
        policy: the model with its adapter; loaded when the trainer starts.
        objective: per-pair loss.
        weighting: how much each pair's loss counts.
        method: label of the run in its folder's name and its summary.
        learning_rate: peak learning rate of AdamW; None chooses one by the model's size
            (``schedule.LEARNING_RATES``) when a fit starts.
        betas: of AdamW.
        weight_decay: of AdamW.
        warmup_ratio: share of the updates in which the learning rate rises linearly from 0.
        min_lr_ratio: share of the peak that the cosine ends at.
        max_grad_norm: the policy's gradient is scaled down to this norm; None for no clipping.
        micro_batch_size: pairs in one forward pass, on each device, or the next smaller divisor of its share;
            None for all of it. "auto": on a GPU as many as fit when a fit tries them, else 4 or a divisor.
        micro_batch_tokens: tokens in one forward pass instead, on each device; a prompt counts once, padding
            does not.
        max_new_tokens: of a response that ``predict`` generates (greedily).
    """

    fused = True
    """LoRA's many small matrices take a quarter of the time, on a CPU too."""

    def __init__(
        self,
        policy: PolicyModel,
        objective: Objective | None = None,
        weighting: Weighting | None = None,
        method: str = "dpo",
        learning_rate: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_ratio: float = 0.03,
        min_lr_ratio: float = 0.1,
        max_grad_norm: float | None = 1.0,
        micro_batch_size: int | Literal["auto"] | None = None,
        micro_batch_tokens: int | None = None,
        max_new_tokens: int = 128,
    ):
        super().__init__(learning_rate, betas, weight_decay, warmup_ratio, min_lr_ratio)
        check_within("(0, inf]", ", or null for none", max_grad_norm=max_grad_norm)
        check_at_least(1, micro_batch_tokens=micro_batch_tokens)
        if isinstance(micro_batch_size, int):
            check_within("[1, inf)", ", or auto, or null", micro_batch_size=micro_batch_size)
            if micro_batch_tokens is not None:
                raise UserError(
                    f"micro_batch_tokens is {micro_batch_tokens} and micro_batch_size {micro_batch_size}, but"
                    " one of them alone cuts a batch; set the other to null."
                )
        # LightningCLI passes plain values; objects from Python must not be pickled into a checkpoint.
        from_cli = _given_hyperparameters.get() is not None
        self.save_hyperparameters(ignore=() if from_cli else ("policy", "objective", "weighting"))
        self.policy = policy
        self.objective = objective or DPO()
        self.weighting = weighting or Unweighted()
        check_is(PolicyModel, "a PolicyModel, made by PolicyModel(NAME)", policy=policy)
        check_is(Objective, "an Objective, such as DPO()", objective=self.objective)
        check_is(Weighting, "a Weighting, such as VNetWeighting()", weighting=self.weighting)
        check_soft_labels(self.weighting, self.objective)
        if self.objective.grouped and not isinstance(self.weighting, Unweighted):
            raise UserError(
                f"{type(self.objective).__name__} weighs the pairs of a batch itself, so "
                f"{type(self.weighting).__name__} would have no effect; use Unweighted with it."
            )
        self.method = method
        self.max_grad_norm = max_grad_norm
        self.asks_micro_batch_size = micro_batch_size == "auto" and micro_batch_tokens is None
        """True if the size is chosen before the fit."""
        in_pairs = AUTO if micro_batch_size == "auto" else micro_batch_size
        self.micro_batch_size = in_pairs if micro_batch_tokens is None else None
        self.micro_batch_tokens = micro_batch_tokens
        self.max_new_tokens = max_new_tokens
        self.automatic_optimization = False
        self.strict_loading = False

        self.held_out_means = RunningMeans((*REWARDS, "kl", "gold_accuracy"))
        self.train_means = RunningMeans((*REWARDS, "grad_norm"))
        self.weight_statistics = WeightStatistics()
        self.options: dict[str, Any] = {}
        self.outer_values: dict[str, Tensor] = {}
        self.began_trained = False  # True if the labels of a fit may have been seen before it

    @property
    def vnet(self) -> torch.nn.Module | None:
        """VNet, if any; no submodule, so that no strategy casts or shards it.

        Lightning's model summary lists submodules only, so its size is printed after it.
        """
        return self.weighting.vnet

    @property
    def vnet_optimizer(self) -> torch.optim.Optimizer | None:
        """VNet's Adam, if any; the weighting steps it, and checkpoints have its state.

        It is not among ``configure_optimizers``': Lightning's ``global_step`` would count its steps too, and
        its DeepSpeed strategy takes one optimizer, each step of which is the policy's.
        """
        return self.weighting.vnet_optimizer

    @property
    def micro_batch(self) -> MicroBatchSize:
        """The pairs of a forward pass, or its tokens; None for all."""
        return TokenBudget(self.micro_batch_tokens) if self.micro_batch_tokens else self.micro_batch_size

    def configure_model(self) -> None:
        """Load the policy, once."""
        self.policy.build()

    def setup(self, stage: str) -> None:
        """Move new metrics and the weighting to the device, before a restore; set the noise rate."""
        check_strategy(self.trainer.strategy, self.policy.quantization)
        device = self.trainer.strategy.root_device
        self.weighting.to(device)
        # DeepSpeed does not move the metrics of modules whose parameters it shards.
        for metrics in (self.train_means, self.weight_statistics, self.held_out_means):
            metrics.to(device)
            if stage == "fit" or metrics is self.held_out_means:  # an evaluation left inference tensors
                metrics.reset()
        data = datamodule(self.trainer)
        if not hasattr(data, "train_pairs") and (stage == "fit" or data is not None):
            raise UserError(
                f"datamodule is {data and type(data).__name__}, but must be a PreferenceDataModule."
            )
        if stage != "fit":
            return
        if (every := self.weighting.every or 0) % (data.meta_every or math.inf):
            self._check_meta(every if data.meta_every else 0)
        if self.vnet is not None and self.trainer.global_step == 0:  # an earlier fit's; restored later
            self.weighting.updates = self.weighting.skipped = 0
        self.weighting.set_label_noise(data.noise_rate, data.uniform_noise)
        for part in (self.weighting, self.objective):
            part.check_pairs(data.train_pairs)
        updates = planned_updates(self.trainer)
        self.weighting.check_plan(updates, len(data.train_dataloader()))
        for sentence in unused_columns(self.weighting, data.train_pairs):
            rank_zero_info(sentence)
        if "auto" in (self.objective.label_noise, self.objective.asked_label_noise):
            self.objective.resolve_label_noise(data.noise_rate)
            if not data.noise_rate:
                rank_zero_info(
                    f"label_noise auto is 0, as no noise is injected, and {type(self.objective).__name__} is "
                    "then plain DPO; for labels that people made give --model.objective.label_noise RATE."
                )
        share = self._share
        if self.asks_micro_batch_size:  # until memory is tried
            self.micro_batch_size = math.gcd(AUTO, share)
        elif self.micro_batch_size and share % self.micro_batch_size:
            divisors = [n for n in range(1, min(self.micro_batch_size, share) + 1) if share % n == 0]
            rank_zero_info(
                f"micro_batch_size is {divisors[-1]} here: {self.micro_batch_size} does not divide the "
                f"{share} pairs that a device gets for one step."
            )
            self.micro_batch_size = divisors[-1]
        self._check_longest(data)
        size = parameter_count(self.policy.name)
        self.learning_rate = learning_rate_by_size(self.learning_rate, size, updates)
        self.save_hyperparameters({"learning_rate": self.learning_rate})
        self.options = self._own_options() | trainer_options(self) | data.fit_options()
        log_short_run(self.trainer)

    @property
    def _share(self) -> int:
        """This rank's pairs of a step."""
        return datamodule(self.trainer).global_batch_size // self.trainer.world_size

    def _check_longest(self, data: Any) -> None:
        budget = self.micro_batch_tokens
        for pairs in (data.train_pairs, data.clean_pairs, data.validation_pairs):
            if budget is None or pairs is None:
                continue
            if (tokens := int(max(pairs.lengths().max(), pairs.lengths(augmented=True).max()))) > budget:
                raise UserError(
                    f"micro_batch_tokens is {budget}, but the longest pair has {tokens} tokens; set it to "
                    f"{tokens} or more, or data.max_length lower, which leaves such pairs out."
                )

    def on_fit_start(self) -> None:
        """Print VNet's size; let the datamodule compute the reference's values to cache."""
        if self.vnet is not None and self.vnet_optimizer is not None:
            size = sum(p.numel() for p in self.vnet.parameters())
            every, updates = self.weighting.every, planned_updates(self.trainer)
            more = ""
            if every is not None and updates <= every:
                more = (
                    f", so only at the first of this run's {updates}, where it mostly learns nothing; train "
                    "longer, or lower --model.weighting.every"
                )
            rank_zero_info(
                f"VNet: {size:,} parameters beside the module's, trained by module.vnet_optimizer "
                f"({type(self.vnet_optimizer).__name__}, {self.vnet_optimizer.param_groups[0]['lr']:g}); "
                f"one of its updates every {every} policy updates{more}."
            )
        self.policy.reference_digest()  # computed now, since a checkpoint should not take so long
        if self.policy.is_sharded:
            self.weighting.check_sharded()
            if self.micro_batch_tokens is not None:
                raise UserError(
                    f"micro_batch_tokens is {self.micro_batch_tokens}, but under ZeRO-3 all processes need "
                    "as many forward passes; set micro_batch_size instead, or use a lower stage."
                )
        data = datamodule(self.trainer)
        check_savable(self.policy.peft, data.tokenizer, self.policy.name)
        data.fill_reference(self.policy)
        if self.weighting.every:
            self.policy.lora_layers()  # raises for experts
        if self.trainer.ckpt_path is None:  # else the checkpoint's choice
            self._resolve_auto(data)
            self.began_trained |= self.trainer.global_step == 0 and self.policy.is_trained

    def _resolve_auto(self, data: Any) -> None:
        """Choose ``micro_batch_size`` and ``gradient_checkpointing`` where they are "auto"."""
        policy, device = self.policy, self.trainer.strategy.root_device
        if not self._auto_options():
            return
        why: object = "the default without a GPU"
        if can_be_tried(device):
            keeps = self.weighting.keep_gradients is True
            why = fit = fit_pairs(
                policy,
                data.longest_pairs(self._share),
                "auto" if self.asks_micro_batch_size else self.micro_batch,
                device,
                meta=self.weighting.every is not None,
                kept=self._share if keeps else 0,
            )
            if self.asks_micro_batch_size:
                self.micro_batch_size = fit.way.size
        elif policy.asks_gradient_checkpointing:
            policy.recompute(False)
        self._report_auto(why)

    def _report_auto(self, why: object) -> None:
        """Record and print the chosen values."""
        if options := self._auto_options():
            self.options |= {name.removeprefix("--model."): value for name, value in options.items()}
            rank_zero_info(chosen(options, why))

    def _auto_options(self) -> dict[str, Any]:
        """Return the options that are "auto" and decided by memory, by full name, with their values."""
        options: dict[str, Any] = {}
        if self.asks_micro_batch_size:
            options["--model.micro_batch_size"] = self.micro_batch_size
        if self.policy.asks_gradient_checkpointing:
            options["--model.policy.gradient_checkpointing"] = self.policy.gradient_checkpointing
        return options

    def training_step(self, batch: TrainingBatch, batch_idx: int) -> dict[str, Any]:
        """One iteration of Algorithm 1: a VNet update if due, then one policy update."""
        train, update = batch.train, self.global_step
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        if (
            isinstance(optimizer, list)
            or not optimizer.param_groups
            or isinstance(schedule, (list, ReduceLROnPlateau))
        ):
            raise UserError(
                "configure_optimizers returns no or several optimizers, several schedules or "
                "ReduceLROnPlateau; return one optimizer, alone or with one schedule by updates."
            )
        learns = self.weighting.every is not None and update % self.weighting.every == 0
        meta = batch.meta if learns else None
        if learns and meta is None:
            self._check_meta(update)
            meta = train[:0]  # of a weighting without one
        keep = meta is not None and self.weighting.keep_gradients
        assert self.learning_rate is not None  # since ``setup``
        # Lines 2 to 12: Theta, if due, and the gradient for omega. Kept gradients end with the call.
        inner, values = policy_gradient(
            StepPairs(self.policy, self.objective, train, self.micro_batch, keep),
            self.weighting,
            meta,
            optimizer.param_groups[0]["lr"],
            self.learning_rate,
        )
        self.outer_values = values or self.outer_values
        norm = get_total_norm(inner.gradient.values())
        self._observe(train, inner, norm)
        if self.max_grad_norm is not None:
            scale = self.max_grad_norm / (norm + 1e-6)
            torch._foreach_mul_(list(inner.gradient.values()), scale.clamp(max=1.0))
        set_gradient(self.trainer.strategy, self.policy.adapter(), inner.gradient)
        optimizer.step()
        optimizer.zero_grad()
        self.policy.gradient_memory.has_stepped = True
        if schedule is not None:
            schedule.step()
        log_every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if log_every and (update + 1) % log_every == 0:
            self._log_training()
        u, delta, weights = inner.rewards.u, inner.rewards.delta, inner.weights
        return {"record": PairRecord(train.ids, u, delta, weights.g, weights.a, weights.b, train.flipped)}

    def _check_meta(self, update: int) -> None:
        """Raise UserError if an update without a meta-batch is due, and the weighting needs one."""
        every = self.weighting.every
        if self.weighting.needs_meta and update < planned_updates(self.trainer):
            raise UserError(
                f"Policy update {update} is due for VNet (every {every}), but has no meta-batch; set the "
                f"datamodule's meta_every to {every}, or in a config the class's every."
            )

    def _observe(self, train: PairBatch, inner: WeightedGradient, norm: Tensor) -> None:
        """Check the step's values, and pass them to objective, weighting and metrics."""
        rewards, losses = inner.rewards, inner.losses
        check_finite(losses, norm, train.ids)
        self.objective.observe(rewards, train.ids)
        self.weighting.observe(rewards, train)
        if self.objective.grouped:
            losses = self.objective.group_value(losses).expand_as(losses)
        self.train_means.update({**reward_values(rewards, losses), "grad_norm": norm.expand_as(losses)})
        floor = None if self.weighting.soft_labels else getattr(self.weighting, "floor", 0.0)
        self.weight_statistics.add(inner.weights, train.flipped, floor)

    def _log_training(self) -> None:
        values = self.train_means.compute() | self.weight_statistics.compute()
        if taken := values.keys() & {*self.outer_values, *self.objective.learned()}:
            raise UserError(f"train/{min(taken)} is the module's own curve; name what is learned otherwise.")
        if seldom := {name: values.pop(name) for name in GAP if name in values} | self.outer_values:
            log_numbers(self.trainer, {f"train/{name}": float(value) for name, value in seldom.items()})
        self.outer_values = {}
        shown = ("loss", "rewards/accuracies")
        self.log_dict({f"train/{name}": values.pop(name) for name in shown}, prog_bar=True)
        self.log_dict({f"train/{name}": value for name, value in values.items()})
        if self.vnet_optimizer is not None:
            vnet_lr = self.vnet_optimizer.param_groups[0]["lr"]
            self.log_dict({"lr-VNet": vnet_lr, "lr-VNet-updates": float(self.weighting.updates)})
        if len(learned := self.objective.learned()) <= CURVES:
            self.log_dict({f"train/{name}": value for name, value in learned.items()})

    def on_validation_start(self) -> None:
        """Check that the policy can read the pairs if no fit has done so."""
        data = datamodule(self.trainer)
        if data is not None and not is_fitting(self):
            data.check_model(self.policy)

    on_test_start = on_validation_start

    def validation_step(self, batch: PairBatch, batch_idx: int) -> None:
        """Add N held-out pairs to the means: unweighted loss, rewards, KL to the reference."""
        parts = batch.micro_batches(self.micro_batch)
        for part, counts in self.policy.in_step(parts, batch[:1]):
            judged = self.policy.judged(part)
            rewards = Rewards.of(judged.policy, part.with_reference(judged.reference), self.objective.beta)
            values = {**reward_values(rewards, self.objective(rewards)), "kl": judged.token_kl}
            if part.eta is not None:
                values["gold_accuracy"] = gold_accuracy(rewards, part.eta)
            if counts:
                self.held_out_means.update(values)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log the means as ``val/...``, or ``test/...``."""
        split = "test" if self.trainer.testing else "val"
        means = self.held_out_means.compute()
        lost = torch.tensor(math.nan, device=self.device)  # the mean is left out if it is not finite
        check_finite(means.get("loss", lost), of=f"{split} loss")
        for name, value in means.items():
            self.log(f"{split}/{name}", value, prog_bar=name in ("loss", "rewards/accuracies"))

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[Response]:
        """Return responses to N prompts, or the batch's own."""
        if batch.answers is not None:
            return batch.answers
        tokenizer = datamodule(self.trainer).tokenizer
        return respond(self.policy, tokenizer, batch, self.max_new_tokens, batch.decoding or Decoding())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep trainable parameters only; add options, the reference's digest and learned state."""
        names = {f"policy.{name}" for name in self.policy.adapter()}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in names}
        checkpoint["options"], checkpoint["began_trained"] = self.options, self.began_trained
        checkpoint["reference"] = self._reference_weights()
        checkpoint["weighting"] = self.weighting.state_dict()
        checkpoint["objective"] = self.objective.state_dict()
        checkpoint["metrics"] = {
            "means": self.train_means.gathered_state(),
            "weights": self.weight_statistics.gathered_state(),
            "outer": self.outer_values,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the weighting; check the adapter, the reference's weights and the options."""
        if is_fitting(self) and "weighting" in checkpoint:  # else it is another module's
            self._take_over(checkpoint["options"])
            check_options(checkpoint["options"], self.options, checkpoint["global_step"])
        saved, needed = set(checkpoint["state_dict"]), {f"policy.{name}" for name in self.policy.adapter()}
        if saved != needed:
            odd = sorted(saved ^ needed)[0]
            raise UserError(
                f"The checkpoint does not fit this model's adapter ({len(saved ^ needed)} parameters differ, "
                f"{odd} for one); use the model and LoRA settings that it was trained with."
            )
        before, now = checkpoint["reference"], self._reference_weights()
        # Other precisions have other bytes; a fit reports those by option name.
        if now != before and all(now[name] == before[name] for name in ("dtype", "quantization")):
            raise UserError(
                f"The weights of {self.policy.name} differ from those that the checkpoint was trained on; "
                "restore them, or train again in a new folder."
            )
        for name, part in (("weighting", self.weighting), ("objective", self.objective)):
            if checkpoint[name].keys() != part.state_dict().keys():
                raise UserError(
                    f"The checkpoint was made with another {name} than {type(part).__name__}; use the one "
                    "that it was made with."
                )
            part.load_state_dict(checkpoint[name])
        if not is_fitting(self):
            check_options(checkpoint["options"], self._own_options())
        self.began_trained = checkpoint["began_trained"]
        metrics = checkpoint["metrics"]
        # Sums over all ranks, continued by one.
        if self.global_rank == 0:
            self.train_means.load_state_dict(metrics["means"])
            self.weight_statistics.load_state_dict(metrics["weights"])
        self.outer_values = metrics["outer"]

    def _take_over(self, saved: dict[str, Any]) -> None:
        """Use what a checkpoint's fit chose for "auto", so that it is resumed exactly."""
        if self.asks_micro_batch_size and (size := saved["micro_batch_size"]) is not None:
            self.micro_batch_size = math.gcd(size, self._share)
        if self.policy.asks_gradient_checkpointing:
            self.policy.recompute(saved["policy.gradient_checkpointing"])
        self._report_auto("the checkpoint's")

    def _own_options(self) -> dict[str, Any]:
        policy = self.policy
        ours = {"r": "rank", "lora_alpha": "alpha"}
        lora = {ours.get(name, name): value for name, value in policy.lora.items()}
        if not isinstance(lora["target_modules"], str):
            lora["target_modules"] = set(lora["target_modules"])  # order does not matter
        own = {name: getattr(self, name) for name in (*OPTIMIZER, "max_grad_norm", *_MICRO_BATCH)}
        names = ("quantization", "attn_implementation", "layout", "gradient_checkpointing")
        numbers = {name: getattr(policy, name) for name in (*names, "lora_compute_dtype")}
        numbers |= {"dtype": str(policy.dtype).removeprefix("torch."), "compile": policy.compiles}
        parts = {"policy": lora | numbers, "objective": self.objective, "weighting": self.weighting}
        return flat_options("", own | parts)

    def _reference_weights(self) -> dict[str, Any]:
        """Return the digest of the reference's weights, and what it depends on besides them."""
        kind = {"dtype": str(self.policy.dtype), "quantization": self.policy.quantization}
        return {"digest": self.policy.reference_digest()} | kind
