"""A run's configuration: resolved values of "auto", and ``config.yaml``."""

from pathlib import Path
from pkgutil import resolve_name

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer, strategies
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info

from ..errors import UserError
from ..files import write_text
from ..modules import PreferenceModule
from ..modules.trainer_flags import OF_A_RUN
from ..policy.numerics import base_dtype
from .folder import CONFIG, SUMMARY

DEEPSPEED = "pacmr_lightning.strategies.LoraDeepSpeedStrategy"


class SaveRunConfig(SaveConfigCallback):
    """Write ``config.yaml`` into the run's folder when training starts, so bad input leaves nothing."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write nothing yet, unlike Lightning's."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file on rank 0, and remove the summary of an earlier fit."""
        if trainer.is_global_zero:
            (Path(trainer.default_root_dir) / SUMMARY).unlink(missing_ok=True)
            config = self.config.clone()
            config.ckpt_path = None  # not part of the run
            if isinstance(pl_module, PreferenceModule):
                own = config.model.init_args
                own.learning_rate = pl_module.learning_rate  # by size, if none was given
                own.micro_batch_size = pl_module.micro_batch_size
                _network_options(config)["gradient_checkpointing"] = pl_module.policy.gradient_checkpointing
            config.checkpoint.dirpath = None  # in the run's folder, wherever that is moved
            text = self.parser.dump(config, skip_unset=False, skip_validation=True)  # parsed already
            write_text(Path(config.trainer.default_root_dir) / CONFIG, text)


def check_flags(config: Namespace) -> None:
    """Raise UserError for flags of the Trainer, and strategies, under which ``pacmr fit`` trains nothing."""
    for (name, value), why in OF_A_RUN.items():
        if config.trainer.get(name) is value:
            raise UserError(f"trainer.{name} is {str(value).lower()}, but {why}; leave it out.")
    name, kind, options = _strategy(config)
    sharded = (strategies.FSDPStrategy, strategies.ModelParallelStrategy)
    if issubclass(kind, sharded) or options.get("start_method", "popen") != "popen":
        raise UserError(
            f"trainer.strategy is {name}, under which pacmr fit does not train; use auto, ddp, or "
            "configs/strategies/zero1.yaml, zero2.yaml or zero3.yaml for DeepSpeed."
        )


def use_lora_deepspeed(config: Namespace) -> None:
    """Replace Lightning's DeepSpeed strategy, a name or a class path, by the own one with its options."""
    name, kind, options = _strategy(config)
    if kind is strategies.DeepSpeedStrategy:  # its checkpoints are folders of each process
        config.trainer.strategy = Namespace(class_path=DEEPSPEED, init_args=options)
        rank_zero_info(f"trainer.strategy {name} is {DEEPSPEED} here, which takes the same options.")


def _strategy(config: Namespace) -> tuple[str, type, Namespace]:
    """Return a strategy's name or class path, its class and options; Strategy for one of no class."""
    given = config.trainer.strategy
    if isinstance(given, Namespace):
        return given.class_path, resolve_name(given.class_path), given.get("init_args") or Namespace()
    entry = dict(strategies.StrategyRegistry).get(given, {"strategy": strategies.Strategy, "init_params": {}})
    return given, entry["strategy"], Namespace(**entry["init_params"])


def resolve_auto(config: Namespace) -> None:
    """Replace dtype's "auto" in the configuration, since other machines will read the run.

    Those that memory decides are tried by the module when the fit starts (``modules.micro_batch_finder``).
    """
    model = config.model.get("init_args") or Namespace()
    options = _network_options(config)
    lora = model.get("policy") or model.get("lora")
    gpu = config.trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if options.get("dtype") == "auto":
        options["dtype"] = str(base_dtype("auto", None if gpu and lora else False)).removeprefix("torch.")
        rank_zero_info(f"dtype auto is {options['dtype']}, {'on a GPU' if gpu else 'without a GPU'}.")


def _network_options(config: Namespace) -> Namespace:
    """The options of the policy, or of a module that has none, in which changes count."""
    model = config.model.get("init_args") or Namespace()
    policy = model.get("policy")
    return policy.init_args if policy else model
