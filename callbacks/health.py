"""Callback that warns of failures of a run, such as self-confirmation of VNet and policy."""

import math
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pacmr_lightning.errors import check_at_least, check_within
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.numerics import wide
from pacmr_lightning.ranks import sum_over_ranks
from pacmr_lightning.runs.folder import CHECKPOINTS
from pacmr_lightning.strategies.sharding import whole

from .visits import record_of

SATURATED_U = math.log(0.999 / 0.001)
LEAST = 10
OUTER = ("meta/d_norm", "meta/coverage", "meta/pseudo_labels_as_observed")
SIGNS = {
    "slope_ratio": "VNet's slope a is {:.2f} times that of its start",
    "norm_ratio": "the norm of d_meta per retained pair is {:.1f} times its median",
    "pseudo_label_drop": "the share of pseudo-labels that agree with the labels is {:.1f} standard errors "
    "under its peak",
}


class Health(Callback):
    """Warnings of a failing run, once per cause, and optionally its end; needs no clean labels.

    Causes: self-confirmation of VNet and policy (the alarm; see ``SelfConfirmation``); a small effective
    sample size of the weights, (sum g)^2 / (N sum g^2); a LoRA matrix B that stays 0; most pairs at
    sigmoid(u) > 0.999, where the loss has no gradient; and VNet updates without a confident meta-batch pair.

    Tags, every ``log_every_n_steps`` updates and over all pairs since: ``warnings/slope_ratio``,
    ``norm_ratio``, ``pseudo_label_agreement``, ``pseudo_label_drop``, ``effective_sample_size``,
    ``saturated_share``, ``idle_vnet_updates`` and ``alarm`` (1 from the alarm on). Files: none, except the
    checkpoint of ``on_alarm="stop"``. Cost: 0.1 ms per update.

    Args:
        on_alarm: "warn", or "stop": save ``checkpoints/alarm-STEP.ckpt``, which can be resumed, and end
            training.
        window: number of last VNet updates of running medians and shares.
        max_slope_ratio: alarm if the mean slope a exceeds this multiple of its start; None for no alarm.
        max_norm_ratio: alarm if the norm of d_meta exceeds this multiple of its running median. None by
            default, since healthy runs with soft pseudo-labels reach 10.
        max_share_drop: alarm if the share of pseudo-labels that agree with the labels is this many standard
            errors under its peak; None for no alarm.
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
        check_at_least(LEAST, window=window)
        check_at_least(1, max_idle_updates=max_idle_updates, lora_after=lora_after)
        ratios = {"max_slope_ratio": max_slope_ratio, "max_norm_ratio": max_norm_ratio}
        check_within("(1, inf]", ", or null for none", **ratios)
        check_within("(0, inf]", ", or null for none", max_share_drop=max_share_drop)
        check_within("[0, 1)", min_effective_sample_size=min_effective_sample_size)
        check_within("(0, 1]", max_saturated_share=max_saturated_share)
        self.on_alarm = on_alarm
        self.window = window
        self.limits = {
            "slope_ratio": max_slope_ratio,
            "norm_ratio": max_norm_ratio,
            "pseudo_label_drop": max_share_drop,
        }
        self.min_effective_sample_size = min_effective_sample_size
        self.max_saturated_share = max_saturated_share
        self.max_idle_updates = max_idle_updates
        self.lora_after = lora_after
        self._reset()

    def _reset(self) -> None:
        self.signs = SelfConfirmation(self.window)
        self.warned: dict[str, int] = {}
        """Step (policy updates done) of each cause's warning."""
        self._idle = 0
        self._sums = torch.zeros(5, dtype=torch.double)
        self._updates: list[dict[str, Tensor]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded after this."""
        if stage == "fit":
            self._reset()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add medians, shares and warnings, the same on all ranks, and unchecked values."""
        signs = self.signs
        checkpoint[type(self).__name__] = {
            "norms": list(signs.norms),
            "agreeing": list(signs.agreeing),
            "peak": signs.peak,
            "warned": self.warned,
            "idle": self._idle,
            "updates": [{name: value.cpu() for name, value in found.items()} for found in self._updates],
            "sums": self._total(trainer).cpu(),
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the state, on any number of ranks."""
        if state := checkpoint.get(type(self).__name__):
            self.signs.norms.extend(state["norms"])
            self.signs.agreeing.extend(state["agreeing"])
            self.signs.peak = state["peak"]
            self.warned, self._idle = dict(state["warned"]), state["idle"]
            self._updates = list(state["updates"])
            # Only the sum over ranks matters.
            if trainer.is_global_zero:
                self._sums = state["sums"]

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Add up the step's pairs on the device; check if the step is logged."""
        record = record_of(outputs)
        g, u = wide(record.weight.detach()), record.u.detach()
        a = torch.zeros_like(g) if record.a is None else wide(record.a.detach())
        columns = (torch.ones_like(g), g, g**2, a, u > SATURATED_U)
        self._sums = self._sums.to(g) + torch.stack([column.to(g).sum() for column in columns])
        every = pl_module.weighting.every
        if every and (trainer.global_step - 1) % every == 0:
            # At a logged step the module has already logged and cleared the values.
            logged = {name.removeprefix("train/"): value for name, value in trainer.callback_metrics.items()}
            values = pl_module.outer_values or logged
            self._updates.append({name: values[name].detach() for name in OUTER if name in values})
        # Lightning sets the attribute without declaring it.
        log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if log_every and trainer.global_step % log_every == 0:
            self._check(trainer, pl_module)
        if trainer.global_step == self.lora_after:
            self._check_adapters(trainer, pl_module)

    def _check(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        """Check, log and warn; all ranks compute the same values."""
        step = trainer.global_step
        pairs, g, squares, a, saturated = self._total(trainer).tolist()
        self._sums.zero_()
        found = {
            "effective_sample_size": (size := g**2 / (pairs * squares) if squares else 0.0),
            "saturated_share": (share := saturated / pairs),
        }
        causes: dict[str, str] = {}
        # All updates since the last check, not only the last one.
        for values in self._updates:
            signs = self._take(pl_module, {name: float(value) for name, value in values.items()})
            found |= signs
            causes |= self.causes(signs)
        self._updates = []
        start_slope = getattr(pl_module.weighting, "start_slope", 0.0)
        if pl_module.vnet is not None and start_slope > 0:
            found["slope_ratio"] = a / pairs / start_slope
            causes |= self.causes({"slope_ratio": found["slope_ratio"]})
        if pl_module.weighting.every:
            found["idle_vnet_updates"] = self._idle
        if causes and "self-confirmation" not in self.warned:
            self._alarm(trainer, " and ".join(causes.values()))
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
                "has no gradient; try fewer epochs, a lower learning_rate, or a smaller beta.",
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

    def _take(self, pl_module: PreferenceModule, values: dict[str, float]) -> dict[str, float]:
        coverage = values.get("meta/coverage", 1.0)
        self._idle = 0 if coverage else self._idle + 1
        if not coverage:
            return self.signs.update(None, 0.0, 0.0)
        norm = values.get("meta/d_norm")
        if norm and getattr(getattr(pl_module.weighting, "outer", None), "normalize", None) == "meta":
            norm /= coverage
        share = values.get("meta/pseudo_labels_as_observed")
        retained = 0.0 if share is None else coverage * datamodule(pl_module.trainer).meta_batch_size
        return self.signs.update(norm or None, (share or 0.0) * retained, retained)

    def causes(self, signs: dict[str, float]) -> dict[str, str]:
        """Return the text of each sign that exceeds its limit, by sign."""
        return {
            name: text.format(signs[name])
            for name, text in SIGNS.items()
            if name in signs and (limit := self.limits[name]) is not None and signs[name] > limit
        }

    def _alarm(self, trainer: Trainer, what: str) -> None:
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
            f"Policy and VNet may confirm each other's mistakes: after {step} updates {what}; try soft "
            "pseudo-labels (SoftPromptConsistency), start_offset auto, a lower learning_rate of VNet, or an "
            f"earlier checkpoint{end}"
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


def dead_adapters(pl_module: PreferenceModule) -> tuple[list[str], int]:
    """Return the names of LoRA matrices B that are 0, and the number of all B; all ranks call it."""
    adapter = pl_module.policy.adapter()
    names = [name for name in adapter if ".lora_B." in name]
    with whole(adapter[name] for name in names):
        alive = torch.stack([adapter[name].detach().ne(0).any() for name in names])
    return [name for name, moved in zip(names, alive.tolist(), strict=True) if not moved], len(names)


class SelfConfirmation:
    """Signs, without clean labels, that VNet and policy confirm each other's mistakes.

    - **slope** a of log g+/g- in u: above the log-odds that the label is right, mistakes get too much weight.
      (Theorem 1's optimum under symmetric noise has a = 1 if u is those log-odds.) ``Health`` computes it.
    - **norm** of d_meta per retained pair, over its running median: it rises in a collapse.
    - **share** of pseudo-labels equal to the label: 1/2 + (1 - 2 eps)(accuracy - 1/2) at noise rate eps.
    """

    def __init__(self, window: int):
        self.norms: deque[float] = deque(maxlen=window)
        self.agreeing: deque[tuple[float, float]] = deque(maxlen=window)
        self.peak: tuple[float, float] | None = None
        """Largest share of a window, and its squared standard error."""

    def update(self, norm: float | None, agreeing: float, retained: float) -> dict[str, float]:
        """Add a VNet update (``norm`` of d_meta per retained pair, None if skipped); return known signs."""
        found = {}
        if norm is not None:
            if len(self.norms) >= LEAST:
                found["norm_ratio"] = norm / median(self.norms)
            self.norms.append(norm)
        if retained:
            self.agreeing.append((agreeing, retained))
        if len(self.agreeing) >= LEAST:
            right, count = (sum(column) for column in zip(*self.agreeing, strict=True))
            share = right / count
            # Laplace's rule, so that a share of 1 has an error too.
            smooth = (right + 1) / (count + 2)
            error = smooth * (1 - smooth) / count
            if self.peak is None or share > self.peak[0]:
                self.peak = share, error
            found["pseudo_label_agreement"] = share
            found["pseudo_label_drop"] = (self.peak[0] - share) / (error + self.peak[1]) ** 0.5
        return found
