"""Flags and callbacks of Lightning's Trainer that a module refuses, each with what to use instead."""

from lightning.pytorch import Trainer, callbacks, strategies
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn

from ..errors import UserError

FLAGS = {
    "accumulate_grad_batches": "an update's pairs are data.global_batch_size, cut by model.micro_batch_size",
    "gradient_clip_val": "model.max_grad_norm is the norm that an update's gradient is clipped to",
    "gradient_clip_algorithm": "a gradient is clipped by its norm, model.max_grad_norm",
}
"""Flags that Lightning uses in automatic optimization alone."""
CALLBACKS = {
    callbacks.BatchSizeFinder: "would change updates; for pairs model.micro_batch_size auto tries what fits",
    callbacks.GradientAccumulationScheduler: "changes an update's rows; pairs have data.global_batch_size",
    callbacks.BackboneFinetuning: "needs module.backbone, which this module lacks; LoRA freezes the base",
    callbacks.ModelPruning: "looks for weights before the model is loaded, so it would prune nothing",
    callbacks.StochasticWeightAveraging: "copies the module before it has a model, so averages nothing",
    callbacks.OnExceptionCheckpoint: "would save half an update; lower checkpoint.every_n_train_steps",
    callbacks.SpikeDetection: "cannot resume; for pairs the callback Health warns of failing runs",
}
OF_A_RUN = {
    ("barebones", True): "a run has curves and checkpoints",
    ("enable_checkpointing", False): "audit, refine and export read a run's last state",
}
"""Values of flags that ``pacmr fit`` refuses."""
CASTS = ("bf16", "bfloat16", "fp16", "amp", "torch_autocast")
"""Sections of DeepSpeed's config that cast weights or their products."""


def check_trainer(trainer: Trainer, automatic: bool, whole: bool) -> None:
    """Raise UserError for a flag or callback that would do nothing or fail.

    The module optimizes ``automatic``ally, and its checkpoints hold the ``whole`` model.
    """
    if overfit := vars(trainer)["overfit_batches"]:
        raise UserError(
            f"trainer.overfit_batches is {overfit}, but it would undo the order of the rows; give a smaller "
            "training file and more epochs instead."
        )
    for name, why in {} if automatic else FLAGS.items():
        if (value := getattr(trainer, name)) != (1 if name == "accumulate_grad_batches" else None):
            raise UserError(f"trainer.{name} is {getattr(value, 'value', value)}, but {why}; leave it out.")
    if isinstance(trainer.strategy, strategies.DeepSpeedStrategy):
        if (batches := trainer.accumulate_grad_batches) > 1:
            raise UserError(
                f"trainer.accumulate_grad_batches is {batches}, but DeepSpeed loses an epoch's last batches "
                "if they are fewer; set it to 1 with a larger data.batch_size, or trainer.strategy to ddp."
            )
        config, precision = trainer.strategy.config or {}, trainer.precision
        # DeepSpeed takes the "auto" of transformers for off in a section, and fails on it elsewhere.
        parts = {n: part.get("enabled") if isinstance(part := config.get(n), dict) else part for n in CASTS}
        on = [n for n, enabled in parts.items() if enabled not in (None, False, "auto")]
        casts = [f"trainer.precision {precision}"] * (precision != "32-true") + [f"{n} enabled" for n in on]
        own = ("optimizer", "scheduler", "train_batch_size", *([] if automatic else ["gradient_clipping"]))
        others = [f"{n} {value}" for n, value in config.items() if value == "auto" or (n in own and value)]
        if wrong := casts + others:
            why = "other options of the run set that, and nothing fills in auto"
            if casts:
                why = "trains in 32-true (half precision: the policy's dtype, or in SFT ddp with bf16-mixed)"
            raise UserError(f"DeepSpeed is given {wrong[0]}, but {why}; leave it out.")
    forks = isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)
    if forks and not automatic and trainer.state.fn == TrainerFn.FITTING:  # SFT saves its model in them
        raise UserError(
            "trainer.strategy forks or spawns processes, with which the trained policy would be lost; give "
            'devices=1 in a notebook, or strategy="ddp" in a script.'
        )
    for callback in vars(trainer)["callbacks"]:  # Lightning sets it elsewhere, without a type
        refusal = next((why for kind, why in CALLBACKS.items() if isinstance(callback, kind)), None)
        if isinstance(callback, callbacks.LearningRateFinder) and not automatic:
            refusal = "needs automatic optimization; without model.learning_rate the size chooses"
        if isinstance(callback, callbacks.WeightAveraging) and not whole:
            refusal = "stores all weights in checkpoints, which hold the adapter alone here"
        plain = type(callback) is callbacks.ModelCheckpoint
        if plain and callback.save_on_exception:
            refusal = f"has save_on_exception, which {CALLBACKS[callbacks.OnExceptionCheckpoint]}"
        # Lightning's own looks at the time in automatic optimization alone.
        if plain and callback._train_time_interval is not None and not automatic:
            refusal = "would ignore its train_time_interval; set checkpoint.train_time_interval instead"
        if refusal:
            raise UserError(f"{type(callback).__name__} {refusal}; take it out of trainer.callbacks.")
