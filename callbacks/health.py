"""Callback that warns of failures of a run, such as self-confirmation of VNet and policy."""

import math
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pacmr_lightning.errors import check_at_least, check_within
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy.numerics import wide
from pacmr_lightning.runs.folder import CHECKPOINTS
from pacmr_lightning.strategies.ranks import sum_over_ranks
from pacmr_lightning.strategies.sharding import whole

from .visits import record_of

SATURATED_U = math.log(0.999 / 0.001)


class Health(Callback):
    """Warnings of a failing run, once per cause, and optionally its end; needs no clean labels.

    Causes: self-confirmation of VNet and policy (the alarm): the mean slope a of log g+/g- in u exceeds the
    log-odds that labels are right, so that mistakes get too much weight (Theorem 1's optimum under symmetric
    noise has a = 1 if u is those log-odds); a small effective sample size of the weights,
    (sum g)^2 / (N sum g^2); a LoRA matrix B that stays 0; most pairs at sigmoid(u) > 0.999, where the loss
    has no gradient; and VNet updates without a confident meta-batch pair.

    Tags, every ``log_every_n_steps`` updates and over all pairs since: ``warnings/slope_ratio``,
    ``restraint`` (how far DPO's restoring force is left at u = 0, as a multiple of beta; docs/methods.md),
    ``effective_sample_size``, ``saturated_share``, ``idle_vnet_updates`` and ``alarm`` (1 from the alarm on).
    Files: none, except the checkpoint of ``on_alarm="stop"``. Cost: 0.1 ms per update.

    Args:
        on_alarm: "warn", or "stop": save ``checkpoints/alarm-STEP.ckpt``, which can be resumed, and end
            training.
        max_slope_ratio: alarm if the mean slope a exceeds this multiple of its start; None for no alarm.
        min_effective_sample_size: warn under this share of the pairs, in [0, 1).
        max_saturated_share: warn over this share of the pairs, in (0, 1].
        max_idle_updates: warn after this many VNet updates in a row without a retained pair.
        lora_after: policy updates after which B is checked.

    Raises:
        UserError: an option is out of its range, or the module returns no record.
    """

    def __init__(
        self,
        on_alarm: Literal["warn", "stop"] = "warn",
        max_slope_ratio: float | None = 1.25,
        min_effective_sample_size: float = 0.3,
        max_saturated_share: float = 0.5,
        max_idle_updates: int = 25,
        lora_after: int = 20,
    ):
        super().__init__()
        check_at_least(1, max_idle_updates=max_idle_updates, lora_after=lora_after)
        check_within("(1, inf]", ", or null for none", max_slope_ratio=max_slope_ratio)
        check_within("[0, 1)", min_effective_sample_size=min_effective_sample_size)
        check_within("(0, 1]", max_saturated_share=max_saturated_share)
        self.on_alarm = on_alarm
        self.max_slope_ratio = max_slope_ratio
        self.min_effective_sample_size = min_effective_sample_size
        self.max_saturated_share = max_saturated_share
        self.max_idle_updates = max_idle_updates
        self.lora_after = lora_after
        self._reset()

    def _reset(self) -> None:
        self.warned: dict[str, int] = {}
        """Step (policy updates done) of each cause's warning."""
        self._idle = 0
        self._sums = torch.zeros(6, dtype=torch.double)
        self._coverage: list[Tensor] = []
        """Shares of the meta-batches that VNet's updates since the last check retained."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded after this."""
        if stage == "fit":
            self._reset()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the warnings, the same on all ranks, and unchecked values."""
        checkpoint[type(self).__name__] = {
            "warned": self.warned,
            "idle": self._idle,
            "coverage": [value.cpu() for value in self._coverage],
            "sums": self._total(trainer).cpu(),
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the state, on any number of ranks."""
        if state := checkpoint.get(type(self).__name__):
            self.warned, self._idle = dict(state["warned"]), state["idle"]
            self._coverage = list(state["coverage"])
            # Only the sum over ranks matters.
            if trainer.is_global_zero:
                self._sums = state["sums"]

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Add up the step's pairs on the device; check if the step is logged."""
        record = record_of(outputs)
        g, u = wide(record.weight.detach()), record.u.detach()
        a = held = torch.zeros_like(g)
        if record.a is not None and record.b is not None:
            a = wide(record.a.detach())
            held = restraint(a, wide(record.b.detach()), getattr(pl_module.weighting, "floor", 0.0))
        columns = (torch.ones_like(g), g, g**2, a, held, u > SATURATED_U)
        self._sums = self._sums.to(g) + torch.stack([column.to(g).sum() for column in columns])
        every = pl_module.weighting.every
        if every and (trainer.global_step - 1) % every == 0:
            # At a logged step the module has already logged and cleared the values.
            logged = {name.removeprefix("train/"): value for name, value in trainer.callback_metrics.items()}
            values = pl_module.outer_values or logged
            if "meta/coverage" in values:
                self._coverage.append(values["meta/coverage"].detach())
        # Lightning sets the attribute without declaring it.
        log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if log_every and trainer.global_step % log_every == 0:
            self._check(trainer, pl_module)
        if trainer.global_step == self.lora_after:
            self._check_adapters(trainer, pl_module)

    def _check(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        """Check, log and warn; all ranks compute the same values."""
        step = trainer.global_step
        pairs, g, squares, a, held, saturated = self._total(trainer).tolist()
        self._sums.zero_()
        found = {
            "effective_sample_size": (size := g**2 / (pairs * squares) if squares else 0.0),
            "saturated_share": (share := saturated / pairs),
        }
        for coverage in self._coverage:
            self._idle = 0 if coverage else self._idle + 1
        self._coverage = []
        start_slope = getattr(pl_module.weighting, "start_slope", 0.0)
        if pl_module.vnet is not None and start_slope > 0:
            found["slope_ratio"] = ratio = a / pairs / start_slope
            limit = self.max_slope_ratio
            if limit is not None and ratio > limit and "self-confirmation" not in self.warned:
                self._alarm(trainer, ratio)
        if a and not pl_module.weighting.soft_labels:
            found["restraint"] = held / pairs
        if pl_module.weighting.every:
            found["idle_vnet_updates"] = self._idle
        found["alarm"] = float("self-confirmation" in self.warned)
        if size < self.min_effective_sample_size:
            self._warn(
                step,
                "effective_sample_size",
                f"After {step} updates the weights' effective sample size is {size:.0%} of the pairs, so few "
                "pairs decide; try a lower learning_rate of VNet, or a smaller beta.",
            )
        if share > self.max_saturated_share:
            self._warn(
                step,
                "saturated_share",
                f"After {step} updates {share:.0%} of the pairs have sigmoid(u) above 0.999, where the loss "
                "has no gradient; try fewer epochs, more pairs or a lower learning_rate; "
                "docs/when_dpo_goes_wrong.md has more.",
            )
        if self._idle >= self.max_idle_updates:
            self._warn(
                step,
                "idle_vnet_updates",
                f"No pair of the meta-batch was confident enough in {self._idle} VNet updates in a row, so "
                "VNet learned nothing; try a lower tau, a larger beta, or SoftPromptConsistency, which needs "
                "no confidence.",
            )
        pl_module.log_dict(
            {f"warnings/{name}": torch.tensor(value, dtype=torch.float32) for name, value in found.items()}
        )

    def _total(self, trainer: Trainer) -> Tensor:
        # On the CPU before the first step, where NCCL cannot reduce.
        total = self._sums.to(trainer.strategy.root_device, copy=True)
        sum_over_ranks([total])
        return total

    def _alarm(self, trainer: Trainer, ratio: float) -> None:
        step = trainer.global_step
        # Before the checkpoint, which stores it.
        self.warned["self-confirmation"] = step
        end = "."
        if self.on_alarm == "stop":
            path = Path(trainer.default_root_dir) / CHECKPOINTS / f"alarm-{step}.ckpt"
            trainer.save_checkpoint(path)
            trainer.should_stop = True
            end = f"; training stops here, and {path} has its state."
        rank_zero_warn(
            f"Policy and VNet may confirm each other's mistakes: after {step} updates VNet's slope a is "
            f"{ratio:.2f} times that of its start; try soft pseudo-labels (SoftPromptConsistency), "
            "start_offset auto, a lower learning_rate of VNet, or an earlier checkpoint"
            f"{end}"
        )

    def _warn(self, step: int, cause: str, sentence: str) -> None:
        if cause not in self.warned:
            self.warned[cause] = step
            rank_zero_warn(sentence)

    def _check_adapters(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        dead, layers = dead_adapters(pl_module)
        if dead:
            self._warn(
                trainer.global_step,
                "lora",
                f"After {trainer.global_step} updates B is 0 in {len(dead)} of {layers} LoRA layers "
                f"(such as {dead[0]}), so they learn nothing; try a higher learning_rate, or leave them "
                "out of target_modules.",
            )


def restraint(a: Tensor, b: Tensor, floor: float) -> Tensor:
    """Return 1 - 2 g'(0) / g(0) of weights g(u) = floor + (1 - floor) sigmoid(a u + b): DPO's 1, or less.

    >>> restraint(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), floor=0.0)  # 1 - 2 a sigmoid(-b)
    tensor([0.0000, 0.7616])
    """
    g = floor + (1 - floor) * b.sigmoid()
    return 1 - 2 * (1 - floor) * a * b.sigmoid() * (-b).sigmoid() / g


def dead_adapters(pl_module: PreferenceModule) -> tuple[list[str], int]:
    """Return the names of LoRA matrices B that are 0, and the number of all B; all ranks call it."""
    adapter = pl_module.policy.adapter()
    names = [name for name in adapter if ".lora_B." in name]
    with whole(adapter[name] for name in names):
        alive = torch.stack([adapter[name].detach().ne(0).any() for name in names])
    return [name for name, moved in zip(names, alive.tolist(), strict=True) if not moved], len(names)
