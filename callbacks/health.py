"""Callback that warns of failures of a run, such as self-confirmation of VNet and policy."""

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from pacmr_lightning.errors import UserError, check_within
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.runs.folder import CHECKPOINTS

MIN_EFFECTIVE = 0.3
"""Effective sample size of the weights, as a share of the pairs, below which few pairs decide."""
MAX_SATURATED = 0.5
"""Share of pairs without a gradient above which a run learns little more."""
IDLE = 25
"""VNet updates without a confident pair after which a run hears of it."""


class Health(Callback):
    """Warnings of a failing run, once per cause, and optionally its end; needs no clean labels.

    It reads the curves at each of their points. Causes:

    - Self-confirmation of VNet and policy (the alarm): the mean slope a of log g+/g- in u exceeds the
      log-odds that labels are right, so that mistakes get too much weight (Theorem 1's optimum under
      symmetric noise has a = 1 if u is those log-odds).
    - A small effective sample size of the weights, (sum g)^2 / (N sum g^2).
    - Most pairs at sigmoid(u) > 0.999, where the loss has no gradient.
    - A VNet whose first updates found no confident pair in the meta-batch.

    Tags: none. Files: none, except the checkpoint of ``on_alarm="stop"``. Cost: microseconds per update.

    Args:
        on_alarm: "warn", or "stop": save ``checkpoints/alarm-STEP.ckpt``, which can be resumed, and end
            training.
        max_slope_ratio: alarm if the mean slope a exceeds this multiple of its start; None for no alarm.

    Raises:
        UserError: an option is out of its range, or the module is not ``PreferenceModule``.
    """

    def __init__(self, on_alarm: Literal["warn", "stop"] = "warn", max_slope_ratio: float | None = 1.25):
        super().__init__()
        check_within("(1, inf]", ", or null for none", max_slope_ratio=max_slope_ratio)
        self.on_alarm = on_alarm
        self.max_slope_ratio = max_slope_ratio
        self._warned: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded after this. UserError for another module."""
        if not isinstance(pl_module, PreferenceModule):
            raise UserError("Health needs the curves of PreferenceModule; remove it from trainer.callbacks.")
        self._warned = []

    def state_dict(self) -> dict[str, Any]:
        """Return the causes that were warned of, the same on all ranks."""
        return {"warned": self._warned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the causes."""
        self._warned = list(state_dict["warned"])

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Check the curves where they have a new point, which is the same on all ranks."""
        # Lightning sets the attribute without declaring it.
        log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not log_every or trainer.global_step % log_every:
            return
        curves, weighting = trainer.callback_metrics, pl_module.weighting
        start_slope, slope = getattr(weighting, "start_slope", 0.0), curves.get("train/weights/slope")
        limit = self.max_slope_ratio
        if limit is not None and slope is not None and slope > limit * start_slope > 0:
            self._alarm(trainer, float(slope) / start_slope)
        after = f"After {trainer.global_step} updates"
        if (size := curves["train/weights/effective_sample_size"]) < MIN_EFFECTIVE:
            self._warn(
                "weights",
                f"{after} the weights' effective sample size is {size:.0%} of the pairs, so few of them "
                "decide; try a floor of the weights, or a lower learning_rate of VNet.",
            )
        if (share := curves["train/rewards/saturated"]) > MAX_SATURATED:
            self._warn(
                "loss",
                f"{after} {share:.0%} of the pairs have sigmoid(u) above 0.999, where the loss has no "
                "gradient; try fewer epochs, more pairs or a lower learning_rate; "
                "docs/when_dpo_goes_wrong.md has more.",
            )
        if not weighting.updates and (skipped := getattr(weighting, "skipped", 0)) >= IDLE:
            self._warn(
                "VNet",
                f"{after} VNet has learned nothing: none of its {skipped} meta-batches had a confident pair; "
                "try a lower tau, a larger beta, or SoftPromptConsistency, which needs no confidence.",
            )

    def _alarm(self, trainer: Trainer, ratio: float) -> None:
        if "self-confirmation" in self._warned:
            return
        sentence = (
            f"Policy and VNet may confirm each other's mistakes: after {trainer.global_step} updates VNet's "
            f"slope a is {ratio:.2f} times that of its start; try soft pseudo-labels "
            "(SoftPromptConsistency), start_offset auto, a lower learning_rate of VNet, or an earlier "
            "checkpoint"
        )
        if self.on_alarm == "warn":
            self._warn("self-confirmation", f"{sentence}.")
            return
        path = Path(trainer.default_root_dir) / CHECKPOINTS / f"alarm-{trainer.global_step}.ckpt"
        self._warn("self-confirmation", f"{sentence}; training stops here, and {path} has its state.")
        trainer.save_checkpoint(path)
        trainer.should_stop = True

    def _warn(self, cause: str, sentence: str) -> None:
        if cause not in self._warned:
            self._warned.append(cause)
            rank_zero_warn(sentence)
