"""Watches a run, and says in one sentence what goes wrong and what to try."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.numerics import wide
from pacmr_lightning.ranks import sum_over_ranks
from pacmr_lightning.runs.folder import CHECKPOINTS

from .health_limits import Limits
from .health_values import dead_adapters, outer_values
from .records import record_of
from .self_confirmation import SelfConfirmation, Thresholds

SATURATED_U = math.log(0.999 / 0.001)
"""u from which sigmoid(u) > 0.999, and DPO's loss is under 1e-3."""


class Health(Callback):
    """Warns once a cause where a run goes wrong, and can stop it; no clean label is needed.

    Causes:

    - VNet and policy confirm each other's mistakes, seen as told in ``SelfConfirmation``: the alarm that
      ``on_alarm`` is about;
    - the effective sample size of the weights, (sum g)^2 / (N sum g^2), is small: few pairs decide;
    - the B of a LoRA layer is 0 after ``lora_after`` policy updates: the layer does not learn;
    - most pairs of a check have sigmoid(u) > 0.999: their DPO loss is under 1e-3 and teaches nothing more;
    - no meta pair passes the confidence threshold in many VNet updates: VNet does not learn.

    Every ``log_every_n_steps`` policy updates it checks what came since, and the loggers get
    ``health/slope_ratio``, ``health/norm_ratio``, ``health/pseudo_label_agreement``,
    ``health/pseudo_label_drop``, ``health/effective_sample_size``, ``health/saturated_share``,
    ``health/idle_vnet_updates`` and ``health/alarm`` (1 from the alarm on), those that are known. Between
    checks nothing leaves the device. A resumed run goes on with the running medians and warns of no cause
    again.

    Args:
        on_alarm: at the self-confirmation alarm "warn", or "stop": keep ``checkpoints/alarm-STEP.ckpt`` and
            end training. A run that is resumed after that goes on.
        window: VNet updates that running medians and shares look back on.
        max_slope_ratio: alarm where the mean slope a has grown to more than this multiple of its start.
        max_norm_ratio: alarm where d_meta is longer than this multiple of its running median. Off unless
            given: with soft pseudo-labels healthy runs reach 10.
        max_share_drop: alarm where the share of pseudo-labels that agree with the labels has fallen this many
            standard errors from its peak.
        min_effective_sample_size: share of the pairs, in [0, 1).
        max_saturated_share: share of the pairs, in (0, 1].
        max_idle_updates: VNet updates in a row without a retained meta pair.
        lora_after: policy updates after which B is looked at.

    Raises:
        UserError: an option is out of its range; at the first step, the module returns no record.
    """

    def __init__(
        self,
        on_alarm: Literal["warn", "stop"] = "warn",
        window: int = 20,
        max_slope_ratio: float | None = 1.25,
        max_norm_ratio: float | None = None,
        max_share_drop: float | None = 4.0,
        min_effective_sample_size: float = 0.3,
        max_saturated_share: float = 0.5,
        max_idle_updates: int = 25,
        lora_after: int = 20,
    ):
        super().__init__()
        for name, value, least in (("window", window, 10), ("lora_after", lora_after, 1)):
            if value < least:
                raise UserError(f"{name} is {value}, but Health needs at least {least}.")
        for name, ratio in (("max_slope_ratio", max_slope_ratio), ("max_norm_ratio", max_norm_ratio)):
            if ratio is not None and not ratio > 1:
                raise UserError(f"{name} is {ratio}, but it must be above 1, or null for none.")
        if max_share_drop is not None and not max_share_drop > 0:
            raise UserError(f"max_share_drop is {max_share_drop}, but it must be above 0, or null for none.")
        self.on_alarm = on_alarm
        self.window = window
        self.thresholds = Thresholds(max_slope_ratio, max_norm_ratio, max_share_drop)
        self.limits = Limits(min_effective_sample_size, max_saturated_share, max_idle_updates)
        self.lora_after = lora_after
        self._reset()

    def _reset(self) -> None:
        self.signs = SelfConfirmation(self.window, self.thresholds)
        self.warned: dict[str, int] = {}
        """Step (policy updates done) at which each cause was warned of."""
        self._idle = 0
        self._sums = torch.zeros(5, dtype=torch.double)
        self._updates: list[dict[str, Tensor]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets an earlier run; a checkpoint is loaded after this."""
        if stage == "fit":
            self._reset()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds medians, shares and warnings, which are the same on all ranks, and what is not checked yet."""
        checkpoint[type(self).__name__] = {
            "signs": self.signs.state_dict(),
            "warned": self.warned,
            "idle": self._idle,
            "updates": [{name: float(value) for name, value in found.items()} for found in self._updates],
            "sums": self._total(trainer).tolist(),
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Goes on from a checkpoint, with this number of ranks or another."""
        state = checkpoint.get(type(self).__name__)
        if state is None:
            return
        self.signs.load_state_dict(state["signs"])
        self.warned, self._idle = dict(state["warned"]), state["idle"]
        self._updates = [
            {name: torch.tensor(value) for name, value in found.items()} for found in state["updates"]
        ]
        # What counts is the sum over the ranks, so rank 0 holds it.
        if trainer.is_global_zero:
            self._sums = torch.tensor(state["sums"], dtype=torch.double)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds up the step's pairs on the device; checks where the step is logged."""
        record = record_of(outputs)
        g, u = wide(record.weight.detach()), record.u.detach()
        a = torch.zeros_like(g) if record.a is None else wide(record.a.detach())
        columns = (torch.ones_like(g), g, g**2, a, u > SATURATED_U)
        self._sums = self._sums.to(g) + torch.stack([column.to(g).sum() for column in columns])
        every = pl_module.weighting.every
        if every and (trainer.global_step - 1) % every == 0:
            self._updates.append(outer_values(trainer, pl_module))
        # Lightning sets the attribute without declaring it.
        log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if log_every and trainer.global_step % log_every == 0:
            self._check(trainer, pl_module)
        if trainer.global_step == self.lora_after:
            self._look_at_lora(trainer, pl_module)

    def _check(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        """All ranks compute the same numbers, so they decide the same."""
        pairs, g, squares, a, saturated = self._total(trainer).tolist()
        self._sums.zero_()
        found = {
            "effective_sample_size": g**2 / (pairs * squares) if squares else 0.0,
            "saturated_share": saturated / pairs,
        }
        causes: dict[str, str] = {}
        # Every update is held against the thresholds, not only the last one before the check.
        for values in self._updates:
            signs = self._take(pl_module, {name: float(value) for name, value in values.items()})
            found |= signs
            causes |= self.signs.causes(signs)
        self._updates = []
        start_slope = getattr(pl_module.weighting, "start_slope", 0.0)
        if pl_module.vnet is not None and start_slope > 0:
            found["slope_ratio"] = a / pairs / start_slope
            causes |= self.signs.causes({"slope_ratio": found["slope_ratio"]})
        if pl_module.weighting.every:
            found["idle_vnet_updates"] = self._idle
        if causes:
            self._alarm(trainer, " and ".join(causes.values()))
        found["alarm"] = float("self-confirmation" in self.warned)
        for cause, sentence in self.limits.causes(found, trainer.global_step).items():
            self._warn(trainer, cause, sentence)
        pl_module.log_dict(
            {f"health/{name}": torch.tensor(value, dtype=torch.float32) for name, value in found.items()}
        )

    def _total(self, trainer: Trainer) -> Tensor:
        """(5,) sums over the ranks since the last check."""
        # Before the first step they are on the CPU, where NCCL reduces nothing.
        total = self._sums.to(trainer.strategy.root_device, copy=True)
        sum_over_ranks([total])
        return total

    def _take(self, pl_module: PreferenceModule, values: dict[str, float]) -> dict[str, float]:
        """Feeds the signs with one VNet update's values."""
        coverage = values.get("meta/coverage", 1.0)
        self._idle = 0 if coverage else self._idle + 1
        norm = values.get("meta/d_norm") if coverage else None
        outer = getattr(pl_module.weighting, "outer", None)
        if norm and getattr(outer, "normalize", None) == "meta":
            norm /= coverage
        share = values.get("meta/pseudo_labels_as_observed") if coverage else None
        retained = 0.0 if share is None else coverage * datamodule(pl_module.trainer).meta_batch_size
        return self.signs.update(norm or None, (share or 0.0) * retained, retained)

    def _alarm(self, trainer: Trainer, what: str) -> None:
        if "self-confirmation" in self.warned:
            return
        self.warned["self-confirmation"] = step = trainer.global_step
        end = "."
        if self.on_alarm == "stop":
            path = Path(trainer.default_root_dir) / CHECKPOINTS / f"alarm-{step}.ckpt"
            trainer.save_checkpoint(path)
            trainer.should_stop = True
            end = f"; training stops here, with {path.name} among the checkpoints."
        rank_zero_warn(
            f"Policy and VNet seem to confirm each other's mistakes: after {step} updates {what}; try soft "
            "pseudo-labels (SoftPromptConsistency), start_offset auto, a lower learning_rate of VNet, or an "
            f"earlier checkpoint{end}"
        )

    def _warn(self, trainer: Trainer, cause: str, sentence: str) -> None:
        if cause not in self.warned:
            self.warned[cause] = trainer.global_step
            rank_zero_warn(sentence)

    def _look_at_lora(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        dead, layers = dead_adapters(pl_module)
        if dead:
            self._warn(
                trainer,
                "lora",
                f"After {trainer.global_step} updates B is 0 in {len(dead)} of {layers} LoRA layers "
                f"({dead[0]} for one), so they learn nothing; try a higher learning_rate, or leave them "
                "out of target_modules.",
            )
