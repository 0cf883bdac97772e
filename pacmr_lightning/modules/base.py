"""Base of both modules: AdamW, checkpoints without the frozen base, and the end of a run that diverges."""

from collections.abc import Sequence
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ..errors import UserError, check_within
from ..strategies.ranks import on_all_ranks, sum_over_ranks
from .resumed_options import is_fitting
from .schedule import planned_updates, warmup_cosine
from .trainer_flags import check_trainer

# A state of an own class may hold numpy's numbers, which are plain values too.
_kinds = {type(np.dtype(code)) for code in f"?{np.typecodes['AllInteger']}{np.typecodes['AllFloat']}"}
torch.serialization.add_safe_globals([np.float64(0).__reduce__()[0], np.dtype, *_kinds])


class TrainedOnly(LightningModule):
    """Base of modules whose checkpoints hold only trained parameters, which AdamW trains.

    Args:
        learning_rate: peak learning rate of AdamW; None if ``setup`` sets it.
        betas: of AdamW.
        weight_decay: of AdamW.
        warmup_ratio: share of the updates in which the learning rate rises linearly from 0, in [0, 1).
        min_lr_ratio: share of the peak that the cosine ends at, in [0, 1].
    """

    fused: bool | None = None
    """True for AdamW in one kernel; None leaves the choice to torch."""

    def __init__(
        self,
        learning_rate: float | None,
        betas: tuple[float, float],
        weight_decay: float,
        warmup_ratio: float,
        min_lr_ratio: float,
    ):
        super().__init__()
        check_within("(0, 1e30]", " (Qu et al.: 5e-6)", learning_rate=learning_rate)
        for beta in betas:
            check_within("[0, 1)", " (usual: 0.9 and 0.95)", **{"one of betas": beta})
        check_within("[0, 1e30]", weight_decay=weight_decay)
        check_within("[0, 1)", ", a share of the updates", warmup_ratio=warmup_ratio)
        check_within("[0, 1]", ", a share of the peak", min_lr_ratio=min_lr_ratio)
        self.learning_rate = learning_rate
        self.betas = betas
        self.weight_decay = weight_decay
        self.warmup_ratio = warmup_ratio
        self.min_lr_ratio = min_lr_ratio

    def configure_callbacks(self) -> list[Any]:
        """Refuse flags and callbacks that would do nothing or fail; give a trial a folder that vanishes."""
        check_trainer(self.trainer, self.automatic_optimization, self.strict_loading)
        if is_fitting(self) and self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder = vars(self.trainer)["_default_root_dir"] = mkdtemp(prefix="pacmr-")
            finalize(self.trainer, rmtree, folder, ignore_errors=True)
        return []

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW over the trained parameters; warm-up, then a cosine to ``min_lr_ratio`` of the peak."""
        assert self.learning_rate is not None  # since ``setup``
        optimizer = torch.optim.AdamW(
            [parameter for parameter in self.parameters() if parameter.requires_grad],
            lr=self.learning_rate,
            betas=self.betas,
            weight_decay=self.weight_decay,
            fused=self.fused,
        )
        updates = planned_updates(self.trainer)
        schedule = warmup_cosine(optimizer, updates, self.warmup_ratio, self.min_lr_ratio)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_train_start(self) -> None:
        """Set this fit's optimizer options (the schedule's next rate) after a checkpoint restored its own."""
        schedule = self.lr_schedulers()
        if not isinstance(schedule, LambdaLR):  # a subclass has another one
            return
        rate = self.learning_rate
        assert rate is not None  # since ``setup``
        schedule.last_epoch = max(schedule.last_epoch, self.trainer.global_step)  # behind in a second fit
        schedule.base_lrs = [rate] * len(schedule.base_lrs)
        groups = self.trainer.optimizers[0].param_groups
        for group, shape in zip(groups, schedule.lr_lambdas, strict=True):
            own = {"initial_lr": rate, "betas": self.betas, "weight_decay": self.weight_decay}
            group |= {"lr": rate * shape(schedule.last_epoch), **own}

    def trained_names(self) -> list[str]:
        """Return the names of trained parameters."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load as in torch, but do not miss the frozen base, or a tied weight under its other name."""
        keys = super().load_state_dict(state_dict, False, assign)
        trained = set(self.trained_names())
        keys.missing_keys[:] = [name for name in keys.missing_keys if name in trained]
        if strict and any(keys):
            super().load_state_dict(state_dict, strict, assign)  # raises torch's error
        return keys


def check_finite(
    losses: Tensor, norm: Tensor | None = None, ids: Sequence[str] = (), of: str = "loss"
) -> None:
    """Raise UserError on all ranks if a loss, or the gradient's norm if given, is not finite on one of them.

    ``losses`` are (N,) with ``ids``, or 0-dim. ``of`` names them.
    """
    bad = ~torch.isfinite(losses)
    count = torch.stack([bad.any(), bad.any() if norm is None else ~norm.isfinite()]).float()
    sum_over_ranks([count])
    if not count.any():
        return
    pairs = on_all_ranks([ids[i] for i in bad.nonzero()[:, 0].tolist()] if ids else [])
    what, look = f"The {of}" if count[0] else "The gradient", ""
    if pairs:
        what = (
            f"The loss of {len(pairs)} pairs ({', '.join(pairs[:5]) + (', ...' if len(pairs) > 5 else '')})"
        )
        look = "look at these pairs, "
    raise UserError(f"{what} is not a finite number; {look}lower the learning rate, or use float32.")
