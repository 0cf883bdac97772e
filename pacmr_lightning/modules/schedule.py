"""A fit's datamodule, learning-rate schedule, number of updates, and interval of the curves."""

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfigType
from torch.optim import Optimizer
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from ..errors import UserError, check_within

LEARNING_RATES = (
    (1e7, 5e-4, "as on the synthetic benchmark, with 137 thousand"),
    (3e8, 2e-4, "as on real text with 135 million; 1e-3 made some of those runs degenerate"),
    (1e9, 6e-5, "interpolated, not measured"),
    (3e9, 2e-5, "interpolated, not measured"),
    (math.inf, 5e-6, "that of Qu et al. for 7 billion"),
)
"""Upper bound on parameters, peak learning rate of LoRA, and source (research/notebook/).

From 135 million to 7 billion parameters the logarithm of the rate is linear in that of the number.
"""

FAR_ABOVE = 3.0
"""Times the rate by size from which a line warns. At eight times PACMR-DPO degenerated on HH."""
FAR = 1e-3
"""Rate times sqrt(updates) from which one warns beyond 0.3 billion parameters: on HH 3.1e-3 was too far."""


def datamodule(trainer: Trainer) -> Any:
    """Return the trainer's datamodule, which Lightning does not declare; None if loaders were given."""
    return trainer.datamodule  # type: ignore[attr-defined]


def learning_rate_by_size(asked: float | None, parameters: int, updates: int) -> float:
    """Return the peak learning rate: the one asked for, or that of the model's size.

    Lines tell the latter, or that the former is far above it, and that a run goes far.
    """
    suited, why = next((rate, why) for most, rate, why in LEARNING_RATES if parameters <= most)
    rate = suited if asked is None else asked
    if parameters > LEARNING_RATES[1][0] and (far := rate * math.sqrt(updates)) > FAR:
        rank_zero_info(
            f"learning_rate {rate:g} times the root of {updates:,} updates is {far:.2g}; above {FAR:g} "
            "policies may go far from the reference. Watch val/guard/kl, or lower --model.learning_rate."
        )
    if asked is None:
        rank_zero_info(
            f"learning_rate {suited:g} is chosen for {parameters:,} parameters ({why}); "
            "another: --model.learning_rate."
        )
    elif asked >= FAR_ABOVE * suited:
        rank_zero_info(
            f"learning_rate {asked:g} is {asked / suited:.2g} times the {suited:g} for {parameters:,} "
            f"parameters ({why}). Policies may degenerate there; leave it out for that rate."
        )
    return rate


def warmup_cosine(
    optimizer: Optimizer, updates: int, warmup_ratio: float, min_lr_ratio: float
) -> LRSchedulerConfigType:
    """Return Lightning's config of a linear warm-up and a cosine to ``min_lr_ratio`` of the peak."""
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, round(warmup_ratio * updates), updates, min_lr_rate=min_lr_ratio
    )
    return {"scheduler": schedule, "interval": "step", "name": "lr"}


def epoch_batches(trainer: Trainer) -> int:
    """Return the batches of an epoch, up to ``limit_train_batches``: a count, or if a float, a share."""
    batches, limit = len(datamodule(trainer).train_dataloader()), trainer.limit_train_batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def planned_updates(trainer: Trainer) -> int:
    """Return the optimizer steps of a whole fit; raises UserError if it has none, or no end.

    Unlike ``trainer.estimated_stepping_batches``, it leaves the loader alone until a checkpoint is restored.
    """
    for name in ("max_steps", "max_epochs", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            raise UserError(f"trainer.{name} is 0, so nothing would be trained; raise it or leave it out.")
    validates = ("val_check_interval", "check_val_every_n_epoch") if trainer.limit_val_batches else ()
    for name in ("accumulate_grad_batches", *validates):
        hint = "; for no validation give trainer.limit_val_batches 0" if "val_" in name else ""
        check_within("(0, inf)", hint, **{f"trainer.{name}": getattr(trainer, name, None)})
    batches, every = epoch_batches(trainer), getattr(trainer, "val_check_interval", "a time")
    of_epoch = trainer.limit_val_batches and trainer.check_val_every_n_epoch is not None
    # By their clocks processes would validate at different updates.
    if every == "a time" or (isinstance(every, int) and every > batches and of_epoch):
        raise UserError(
            f"trainer.val_check_interval is {every}, but an epoch has {batches} batches; give at most that, "
            "a share such as 0.5, or set trainer.check_val_every_n_epoch null to count batches over epochs."
        )
    bounds = [trainer.max_steps] if trainer.max_steps > 0 else []
    if trainer.max_epochs not in (None, -1):
        bounds.append(trainer.max_epochs * math.ceil(batches / trainer.accumulate_grad_batches))
    if not bounds:
        raise UserError("The run has no end; set trainer.max_epochs or trainer.max_steps.")
    return max(1, min(bounds))


def log_short_run(trainer: Trainer) -> None:
    """Log a fit at each update if its curves would have fewer than two points otherwise."""
    every, updates = trainer.log_every_n_steps, planned_updates(trainer)  # type: ignore[attr-defined]
    if trainer.loggers and updates < 2 * every and every > 1:
        trainer.log_every_n_steps = 1  # type: ignore[attr-defined]
        rank_zero_info(
            f"Curves get a point at each of the run's {updates} updates, since trainer.log_every_n_steps "
            f"{every} would give them {updates // every or 'none'}."
        )
