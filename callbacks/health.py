"""Callback that warns of failures of a run, such as self-confirmation of VNet and policy."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from pacmr_lightning.errors import check_within

from .recurring import check_module

MIN_EFFECTIVE = 0.3
"""Effective sample size of the weights, as a share of the pairs, below which few pairs decide."""
MAX_SATURATED = 0.5
"""Share of pairs without a gradient above which a run learns little more."""


class Health(Callback):
    """Warnings of a failing run, once per cause; needs no clean labels.

    It reads the curves at each of their points. Causes:

    - Self-confirmation of VNet and policy: the mean slope a of log g+/g- in u exceeds the log-odds that
      labels are right, so that mistakes get too much weight (Theorem 1's optimum under symmetric noise has
      a = 1 if u is those log-odds).
    - A small effective sample size of the weights, (sum g)^2 / (N sum g^2).
    - Most pairs at sigmoid(u) > 0.999, where the loss has no gradient.

    Tags: none. Files: none. Cost: microseconds per update.

    Args:
        max_slope_ratio: warn if the mean slope a exceeds this multiple of its start; None for never.

    Raises:
        UserError: an option is out of its range, or the module is not ``PreferenceModule``.
    """

    def __init__(self, max_slope_ratio: float | None = 1.25):
        super().__init__()
        check_within("(1, inf]", ", or null for none", max_slope_ratio=max_slope_ratio)
        self.max_slope_ratio = max_slope_ratio
        self._warned: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded after this. UserError for another module."""
        check_module(self, pl_module)
        self._warned = []

    def state_dict(self) -> dict[str, Any]:
        """Return the causes that were warned of, the same on all ranks."""
        return {"warned": self._warned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the causes."""
        self._warned = list(state_dict["warned"])

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Check the curves where they have a new point, which is the same on all ranks."""
        log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not log_every or trainer.global_step % log_every:
            return
        curves, after = trainer.callback_metrics, f"After {trainer.global_step} updates"
        start, slope = getattr(pl_module.weighting, "start_slope", 0.0), curves.get("train/weights/slope")
        limit = self.max_slope_ratio
        if limit is not None and slope is not None and slope > limit * start > 0:
            self._warn(
                "self-confirmation",
                f"{after} VNet's slope a is {float(slope) / start:.2f} times its start, so it and the "
                "policy may confirm each other's mistakes; try soft pseudo-labels (SoftPromptConsistency), "
                "start_offset auto, a lower learning_rate of VNet, or an earlier checkpoint.",
            )
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

    def _warn(self, cause: str, sentence: str) -> None:
        if cause not in self._warned:
            self._warned.append(cause)
            rank_zero_warn(sentence)
