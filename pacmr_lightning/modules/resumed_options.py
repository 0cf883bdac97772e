"""Options that decide a run's results: saved in checkpoints and compared on resuming."""

import inspect
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from ..errors import UserError
from ..files import content_digest, local_path
from .schedule import epoch_batches, planned_updates

OPTIMIZER = ("learning_rate", "betas", "weight_decay", "warmup_ratio", "min_lr_ratio")
"""Options of both modules that a resumed fit may change."""
_USED = {
    *(*OPTIMIZER, "max_grad_norm", "micro_batch_size", "micro_batch_tokens", "planned updates", "seed"),
    *("trainer.precision", "trainer.gradient_clip_val", "trainer.gradient_clip_algorithm"),
    *("policy.attn_implementation", "policy.layout", "policy.compile", "policy.lora_compute_dtype"),
    *("weighting.keep_gradients", "policy.gradient_checkpointing", "gradient_checkpointing"),
    "validation pairs",
}
"""Options that a resumed fit may change; all others must equal the checkpoint's."""
_SAID = ("objective", "policy.dtype", "policy.quantization")
_EVALUATED = ("policy.alpha", "policy.rank", "policy.use_rslora", *_SAID)
"""Beginnings of options that an evaluation's values depend on; those of ``_SAID`` may differ."""


def is_fitting(module: LightningModule) -> bool:
    """Return true while a trainer fits the module."""
    try:
        return module.trainer.state.fn == TrainerFn.FITTING
    except RuntimeError:  # Lightning's, without a trainer
        return False


def trainer_options(module: LightningModule) -> dict[str, Any]:
    """Return the planned updates, batches of an epoch, precision and seed."""
    return {
        "batches of an epoch": epoch_batches(module.trainer),
        "planned updates": planned_updates(module.trainer),
        "trainer.precision": module.trainer.precision,
        "seed": int(seed) if (seed := os.environ.get("PL_GLOBAL_SEED")) else None,
    }


def flat_options(name: str, value: Any) -> dict[str, Any]:
    """Return an option as plain values by dotted name.

    An object has the arguments of its constructor that it keeps under their names, a file its name and
    content, a function or class its import path.
    """
    if isinstance(value, (Enum, os.PathLike)):
        return flat_options(name, value.value if isinstance(value, Enum) else os.fspath(value))
    # os.path, for which a long text is no file, and no error.
    if isinstance(value, str) and os.path.isfile(path := local_path(value)):
        return {name: f"{path.name} ({content_digest(path)[:12]})"}
    if value is None or isinstance(value, (int, float, str, np.generic)):
        return {name: value.item() if isinstance(value, np.generic) else value}
    if hasattr(value, "__qualname__"):
        return {name: f"{getattr(value, '__module__', '')}.{value.__qualname__}"}
    several = isinstance(value, (list, tuple, set))
    if isinstance(value, Mapping):
        items = [(f"{name}.{key}" if name else key, item) for key, item in value.items()]
    elif several:
        value = sorted(value, key=repr) if isinstance(value, set) else value
        items = [(f"{name}.{place}", item) for place, item in enumerate(value)]
    else:
        kinds = () if isinstance(value, (nn.Module, Tensor)) else type(value).__mro__[:-1]
        made = [kind.__init__ for kind in kinds]  # type: ignore[misc]
        keys = dict.fromkeys(key for each in made for key in inspect.signature(each).parameters)
        items = [(f"{name}.{key}", getattr(value, key)) for key in keys if hasattr(value, key)]
    options = {} if several or isinstance(value, Mapping) else {name: type(value).__name__}
    for key, item in items:
        options |= flat_options(key, item)
    plain = several and [*options] == [key for key, _ in items]
    return {name: [*options.values()]} if plain else options


def check_options(saved: dict[str, Any], now: dict[str, Any], done: int | None = None) -> None:
    """Refuse options that may not change, LoRA's in an evaluation (``done`` None); print others that did."""
    changed = [name for name in now | saved if now.get(name) != saved.get(name)]
    if done is None:
        changed = [name for name in changed if saved and name.startswith(_EVALUATED)]
    may = _USED if done is not None else {name for name in changed if name.startswith(_SAID)}
    told = {name: f"{name} {now.get(name)} instead of {saved.get(name)}" for name in changed}
    # Options of another class are not compared.
    refused = [told[name] for name in changed if name not in may and name.rpartition(".")[0] not in told]
    if refused:
        raise UserError(
            f"Other options or data than the checkpoint's are given: {', '.join(refused)}; take the "
            "checkpoint's, or train a new run in another folder."
        )
    if told:
        rank_zero_info(f"Going on with others than the checkpoint's: {', '.join(told.values())}.")
    if done is not None and (planned := now["planned updates"]) <= done:
        rank_zero_info(
            f"Nothing is left to train: {done} of {planned} updates are done; raise max_steps or max_epochs."
        )
