"""The options that decide a run's numbers: kept in its checkpoints and compared when a fit resumes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.optim.lr_scheduler import LambdaLR

from ..errors import UserError
from ..files import content_digest
from .schedule import planned_updates

OPTIMIZER = ("learning_rate", "betas", "weight_decay", "warmup_ratio", "min_lr_ratio")
"""Options of both modules that a resumed fit may change."""
_USED = {
    *(*OPTIMIZER, "max_grad_norm", "micro_batch_size", "planned updates", "seed"),
    *("trainer.precision", "trainer.gradient_clip_val", "trainer.gradient_clip_algorithm"),
    *("policy.attn_implementation", "policy.layout", "policy.compile"),
}
"""Options that a resumed fit takes from its own configuration; all others must be the checkpoint's."""


def is_fitting(module: LightningModule) -> bool:
    """Return whether a trainer fits the module; false for an evaluation, and without a trainer."""
    try:
        return module.trainer.state.fn == TrainerFn.FITTING
    except RuntimeError:  # Lightning's, where there is no trainer
        return False


def trainer_options(module: LightningModule) -> dict[str, Any]:
    """Return what the trainer adds to a module's options: the planned updates, its precision and the seed."""
    return {
        "planned updates": planned_updates(module.trainer),
        "trainer.precision": module.trainer.precision,
        "seed": int(seed) if (seed := os.environ.get("PL_GLOBAL_SEED")) else None,
    }


def flat_options(name: str, value: Any) -> dict[str, Any]:
    """Return an option as plain values by dotted name.

    Args:
        name: of the option.
        value: a plain value, a mapping, a sequence, or an object. An object's options are the arguments of
            its class that it keeps under their names. A file is known by its name and content.
    """
    if isinstance(value, str) and os.path.isfile(value):
        return {name: f"{Path(value).name} ({content_digest(value)[:12]})"}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {name: value}
    if isinstance(value, Mapping):
        items = [(f"{name}.{key}" if name else key, item) for key, item in value.items()]
    elif isinstance(value, (list, tuple, set)):
        plain = [item if isinstance(item, (bool, int, float)) else str(item) for item in value]
        return {name: sorted(plain) if isinstance(value, set) else plain}
    elif inspect.isroutine(value):
        return {}
    else:
        arguments = [key for key in _arguments(type(value)) if hasattr(value, key)]
        items = [(f"{name}.{key}", getattr(value, key)) for key in arguments]
    found = {} if isinstance(value, Mapping) else {name: type(value).__name__}
    for key, item in items:
        found |= flat_options(key, item)
    return found


def _arguments(kind: type) -> list[str]:
    try:
        return list(inspect.signature(kind).parameters)
    except (TypeError, ValueError):  # a class of an extension in C
        return []


def check_options(saved: dict[str, Any], now: dict[str, Any], done: int) -> None:
    """Compare a resumed fit's options with the checkpoint's, and print those that it may change.

    Args:
        saved: the checkpoint's.
        now: the fit's.
        done: updates of the checkpoint.

    Raises:
        UserError: another option differs.
    """
    changed = [name for name in now | saved if now.get(name) != saved.get(name)]
    told = {name: f"{name} {now.get(name)} instead of {saved.get(name)}" for name in changed}
    # The options of another class are not compared.
    refused = [told[name] for name in changed if name not in _USED and name.rpartition(".")[0] not in told]
    if refused:
        raise UserError(
            f"The fit has other options than its checkpoint: {', '.join(refused)}; resume with the "
            "checkpoint's, or start a new run in another folder."
        )
    if told:
        rank_zero_info(f"Resuming with other options than the checkpoint's: {', '.join(told.values())}.")
    if (planned := now["planned updates"]) <= done:
        rank_zero_info(
            f"Nothing is left to train: {done} of {planned} updates are done; raise trainer.max_epochs."
        )


def use_options(
    module: LightningModule, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> None:
    """Set the optimizer's options of this fit where a checkpoint has restored its own.

    The learning rate is the schedule's at the update that comes next. Nothing changes in a fit from step 0.
    """
    schedule = module.lr_schedulers()
    if not isinstance(schedule, LambdaLR):  # a subclass has another one
        return
    optimizer = module.trainer.optimizers[0]
    schedule.base_lrs = [learning_rate] * len(schedule.base_lrs)
    for group, shape in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
        own = {"initial_lr": learning_rate, "betas": betas, "weight_decay": weight_decay}
        group |= {"lr": learning_rate * shape(schedule.last_epoch), **own}
