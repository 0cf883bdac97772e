"""A run's configuration: resolved values of "auto", and ``config.yaml``."""

import os
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ..files import write_text
from ..memory import free_memory
from ..modules import PreferenceModule
from ..modules.datamodule import datamodule
from ..modules.sft import SFTModule
from ..numerics import base_dtype
from ..ranks import min_over_ranks
from ..recorded import as_config
from ..waiting import waiting
from .folder import CHECKPOINTS, CONFIG
from .memory_estimate import FREE, GIB, sft_step_bytes, step_bytes, ways_to_step

DEEPSPEED = "pacmr_lightning.strategies.LoraDeepSpeedStrategy"
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Dtypes of the trainer's mixed precisions."""

BY_PYTHON = "# Written by RunCheckpoint for a run that Python started.\n"


class SaveRunConfig(SaveConfigCallback):
    """Write ``config.yaml`` into the run's folder when training starts, so bad input leaves nothing."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Resolve ``gradient_checkpointing`` and ``micro_batch_size`` by memory; lengths are known now."""
        if stage != "fit" or not isinstance(pl_module, PreferenceModule | SFTModule):
            return
        options = _network_options(self.config)
        recompute = decide_step(pl_module, trainer, options.get("gradient_checkpointing"))
        if recompute is None:
            return
        options["gradient_checkpointing"] = recompute
        if isinstance(pl_module, SFTModule):
            pl_module.hparams["gradient_checkpointing"] = recompute
        else:
            pl_module.policy.gradient_checkpointing = recompute

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file on rank 0."""
        if trainer.is_global_zero:
            config = self.config.clone()
            root = Path(config.trainer.default_root_dir)
            # Not part of the run, whose second pass has this file too.
            config.pop("refine", None)
            config.ckpt_path = None  # not part of the run
            if isinstance(pl_module, PreferenceModule):
                own = config.model.init_args
                own.learning_rate = pl_module.learning_rate  # by size, if none was given
                own.micro_batch_size = pl_module.micro_batch_size
            if config.checkpoint.dirpath == str(root / CHECKPOINTS):  # a run elsewhere has its own
                config.checkpoint.dirpath = None
            text = self.parser.dump(config, skip_unset=False, skip_validation=True)  # parsed already
            write_text(root / CONFIG, text)


def write_config(trainer: Trainer, module: PreferenceModule) -> None:
    """Write ``config.yaml`` of a run that Python started, which audit, refine and export read.

    Its callbacks are those of this package, with their defaults. If an object of the run cannot be written, a
    warning names it, and there is no file.
    """
    data = datamodule(trainer)
    try:
        sections = {"model": as_config(module), "data": as_config(data)}
    except TypeError as error:
        rank_zero_warn(f"No {CONFIG} is written, since {error}; so pacmr audit cannot take this run.")
        return
    chosen = {"learning_rate": module.learning_rate, "micro_batch_size": module.micro_batch_size}
    sections["model"]["init_args"] |= chosen
    options = sections["data"]["init_args"]
    if options.pop("tokenizer") != module.policy.name:
        rank_zero_warn(f"No {CONFIG} is written, since the tokenizer is not that of {module.policy.name}.")
        return
    options.pop("meta_every", None)  # linked to the weighting
    names = ("max_epochs", "max_steps", "val_check_interval", "limit_val_batches", "log_every_n_steps")
    settings: dict[str, Any] = {name: getattr(trainer, name) for name in (*names, "precision")}
    callbacks: Any = vars(trainer)["callbacks"]  # Lightning sets it elsewhere, without a type
    own = [type(one) for one in callbacks if type(one).__module__.startswith("pacmr_lightning.callbacks")]
    paths = [f"{kind.__module__}.{kind.__qualname__}" for kind in own if kind.__name__ != "RunCheckpoint"]
    settings["callbacks"] = [{"class_path": path} for path in paths]
    settings["default_root_dir"] = str(trainer.default_root_dir)
    seed = os.environ.get("PL_GLOBAL_SEED")
    config = {"seed_everything": int(seed) if seed else True, **sections, "trainer": settings}
    path = Path(trainer.default_root_dir) / CONFIG
    if path.exists() and not path.read_text(encoding="utf-8").startswith(BY_PYTHON):
        rank_zero_warn(
            f"{path} is there already and is kept; give the trainer a default_root_dir of its own."
        )
        return
    write_text(path, BY_PYTHON + yaml.safe_dump(config, sort_keys=False))


def decide_step(
    module: PreferenceModule | SFTModule, trainer: Trainer, recompute: bool | Literal["auto"] | None
) -> bool | None:
    """Decide and print ``micro_batch_size`` and ``gradient_checkpointing`` where they are "auto".

    A step of the longest pairs must fit into ``FREE`` of the free memory of all ranks' devices, the first of
    ``ways_to_step``. On a CPU ``micro_batch_size`` has a fixed default.

    Returns:
        Whether activations are recomputed; None if ``recompute`` is not "auto".
    """
    device, auto = trainer.strategy.root_device, recompute == "auto"
    gpu = device.type == "cuda"
    owner = "--model" if isinstance(module, SFTModule) else "--model.policy"
    option = f"{owner}.gradient_checkpointing"
    if unknown := _not_estimated(module, trainer):
        if auto:
            rank_zero_info(
                f"gradient_checkpointing auto is true: a step's memory with {unknown} is not estimated; "
                f"overrule it by {option} false."
            )
        return auto or None
    if not (ways := _ways(module, trainer, recompute)):
        return None
    # Processes on one machine share its RAM.
    free = min_over_ranks(free_memory(device) // (1 if gpu else trainer.num_devices), device)
    with waiting("Estimating a step's memory"):
        for size, recomputed in ways:
            if size is None and recomputed:  # the last way
                break
            needed = _step_bytes(module, trainer, size, recomputed)
            if needed <= FREE * free:
                break
    found: dict[str, Any] = {option: recomputed} if auto else {}
    if size is not None:
        assert isinstance(module, PreferenceModule)
        module.micro_batch_size = size
        found = {"--model.micro_batch_size": size} | found
    said = (f"{name.rpartition('.')[2]} auto is {str(value).lower()}" for name, value in found.items())
    rank_zero_info(
        f"{' and '.join(said)}: {'without it ' if size is None else ''}a step takes some "
        f"{needed / GIB:.3g} GiB (calculated, not measured), and {free / GIB:.3g} GiB of "
        f"{'the GPU' if gpu else 'RAM'} are free; overrule by {' and '.join(found)}."
    )
    return recomputed if auto else None


def _not_estimated(module: PreferenceModule | SFTModule, trainer: Trainer) -> str:
    """Return the reason why a step's memory is not estimated; empty if it is."""
    if isinstance(module, SFTModule):
        return "DeepSpeed" if isinstance(trainer.strategy, DeepSpeedStrategy) else ""
    # No kernel avoids the scores.
    return "eager attention" if module.policy.attn_implementation == "eager" else ""


def _ways(
    module: PreferenceModule | SFTModule, trainer: Trainer, recompute: bool | Literal["auto"] | None
) -> list[tuple[int | None, bool]]:
    """Return pairs of a micro-batch (None: the module's), and whether to recompute, the fastest way first."""
    gpu = trainer.strategy.root_device.type == "cuda"
    if isinstance(module, PreferenceModule) and module.asks_micro_batch_size and gpu:
        data = datamodule(trainer)
        share, (prompt, response) = data.global_batch_size // trainer.world_size, data.train_pairs.longest()
        return list(ways_to_step(share, prompt + 2 * response, recompute or False))
    return [(None, False), (None, True)] if recompute == "auto" else []


def _step_bytes(
    module: PreferenceModule | SFTModule, trainer: Trainer, pairs: int | None = None, recomputed: bool = False
) -> float:
    """Bytes of a step of the longest rows; ``pairs`` replaces the module's number of them."""
    data = datamodule(trainer)
    if isinstance(module, SFTModule):
        tokens, responses = data.longest()
        return sft_step_bytes(
            module.unbuilt(data.tokenizer),
            rows=data.batch_size,
            tokens=tokens,
            responses=responses,
            devices=trainer.world_size,
            mixed=MIXED.get(trainer.precision),
        )
    pairs = pairs or module.micro_batch_size or data.global_batch_size // trainer.world_size
    prompt, response = data.train_pairs.longest()
    if module.micro_batch_tokens is not None:
        pairs = min(pairs, max(1, module.micro_batch_tokens // (prompt + 2 * response)))
    strategy = trainer.strategy
    zero = (
        (strategy.config or {}).get("zero_optimization") if isinstance(strategy, DeepSpeedStrategy) else None
    )
    return step_bytes(module.policy, pairs, prompt, response, trainer.world_size, zero, recomputed)


def use_lora_deepspeed(config: Namespace) -> None:
    """Replace Lightning's DeepSpeed strategy, a name or a class path, by the adapter's with its options."""
    given, model = config.trainer.strategy, resolve_name(config.model.class_path)
    if not issubclass(model, PreferenceModule):  # SFT trains under Lightning's own, too
        return
    if isinstance(given, Namespace):
        name, kind, options = given.class_path, resolve_name(given.class_path), given.get("init_args")
    elif given in StrategyRegistry:
        name, kind = given, StrategyRegistry[given]["strategy"]
        options = Namespace(**StrategyRegistry[given]["init_params"])
    else:
        return
    if kind is DeepSpeedStrategy:
        config.trainer.strategy = Namespace(class_path=DEEPSPEED, init_args=options)
        rank_zero_info(f"trainer.strategy {name} is {DEEPSPEED} here, which takes the same options.")


def resolve_auto(config: Namespace) -> None:
    """Replace dtype's "auto" in the configuration, since other machines will read the run.

    ``SaveRunConfig`` replaces that of ``gradient_checkpointing``, which needs the data's lengths.
    """
    model = config.model.get("init_args") or Namespace()
    policy = model.get("policy")
    options = _network_options(config)
    lora = policy or model.get("lora")
    gpu = config.trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if options.get("dtype") == "auto":
        options["dtype"] = str(base_dtype("auto", gpu and bool(lora))).removeprefix("torch.")
        rank_zero_info(f"dtype auto is {options['dtype']}, {'on a GPU' if gpu else 'without a GPU'}.")


def _network_options(config: Namespace) -> Namespace:
    """The options of the policy, or of a module that has none, in which changes count."""
    model = config.model.get("init_args") or Namespace()
    policy = model.get("policy")
    return policy.init_args if policy else model
