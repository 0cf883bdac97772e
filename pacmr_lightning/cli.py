"""The ``pacmr`` command: LightningCLI's fit, validate, test and predict, and the tools around them."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import lightning.pytorch.callbacks as lightning_callbacks
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# Importing the packages is what makes the short names of their classes work in YAML.
from . import callbacks as callbacks_of_runs
from . import datamodules, robust_objectives  # noqa: F401
from .errors import UserError
from .loggers import ContinuedCSVLogger
from .messages import full_disk, short_message, stop, user_error
from .modules import PreferenceModule, SFTModule  # noqa: F401
from .run_folder import CONFIG, replacing

RUNS = {
    "fit": "Trains: SFT, DPO, PACMR-DPO, as the configs say.",
    "validate": "Metrics of a checkpoint on the validation pairs.",
    "test": "The same pairs and metrics, under the name test/.",
    "predict": "Greedy responses of a checkpoint to the validation prompts.",
}
TOOLS = {
    "inspect": "datamodules.inspection.inspect_tool",
    "augment": "datamodules.augmentation.augment",
    "clean-meta": "datamodules.clean_meta",
    "analyze": "analysis.analyze",
    "audit": "datamodules.audit_tool",
    "compare": "compare",
    "export": "export",
    "surfaces": "analysis.surfaces_page",
}
"""Commands that are no trainer runs: modules with a one-line docstring and ``main(arguments)``.

By name, so that a trainer run does not wait for what only they import.
"""


NOISE = (
    # It takes the state after the update for a mistake; it is what resuming needs.
    "Using ModelCheckpoint with manual optimization",
    # Of libraries about each other.
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    "`is_gradient_checkpointing` is deprecated",
    "`gradient_checkpointing_enable` is deprecated",
    ".*does not have many workers",
    # Means over all ranks are logged, of which Lightning does not know.
    ".*sync_dist=True",
    # Of a call from Python, as in the tests.
    "LightningCLI's args parameter is intended",
)
"""Warnings that a user of the command can do nothing about."""


class Parser(LightningArgumentParser):
    """LightningCLI's parser, which says what is wrong in one sentence."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints one sentence and exits with status 2."""
        stop(short_message(message))


class SaveRunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's folder once training starts, so bad input leaves nothing."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file on rank zero."""
        if trainer.is_global_zero:
            text = self.parser.dump(self.config, skip_none=False)
            with replacing(Path(trainer.default_root_dir) / CONFIG) as temporary:
                temporary.write_text(text)


class PacmrCLI(LightningCLI):
    """LightningCLI whose runs live in ``runs/<name>/`` with their config, metrics and checkpoints.

    Beside Lightning's own options it adds the ``checkpoint`` section (``RunCheckpoint``), links the
    weighting's ``every`` to the datamodule's ``meta_every`` and the policy's ``model`` to its ``tokenizer``,
    and logs to TensorBoard and ``metrics.csv`` unless ``trainer.logger`` says otherwise.
    """

    def __init__(self, args: list[str] | None = None):
        super().__init__(
            model_class=LightningModule,
            datamodule_class=LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=Parser,
            parser_kwargs={"prog": "pacmr"},
            save_config_callback=SaveRunConfig,
            seed_everything_default=42,
            auto_configure_optimizers=False,
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the checkpoint section and the links between module and datamodule."""
        parser.add_lightning_class_args(callbacks_of_runs.RunCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.save_last": True, "checkpoint.filename": "step-{step}"})
        parser.set_defaults({"checkpoint.auto_insert_metric_name": False})
        parser.link_arguments("model.init_args.weighting", "data.init_args.meta_every", compute_fn=_every)
        parser.link_arguments("model.init_args.policy.init_args.model", "data.init_args.tokenizer")

    def before_instantiate_classes(self) -> None:
        """Names the run's folder, and refuses to overwrite another run.

        Raises:
            UserError: the folder holds a run already and nothing says that it goes on.
        """
        config = self.config[self.subcommand]
        if config.trainer.default_root_dir is None:
            config.trainer.default_root_dir = _run_folder(config)
        root = Path(config.trainer.default_root_dir)
        self._new_folders = [folder for folder in (root, *root.parents) if not folder.exists()]
        if config.checkpoint.dirpath is None:
            config.checkpoint.dirpath = str(root / "checkpoints")
        if self.subcommand == "fit" and (root / CONFIG).exists() and config.ckpt_path is None:
            raise UserError(
                f"The folder {root} holds a run already; continue it with --ckpt_path last, or name another "
                "one with --trainer.default_root_dir."
            )
        named = config.ckpt_path and config.ckpt_path not in ("last", "best", "hpc", "registry")
        if named and not Path(config.ckpt_path).exists():
            raise UserError(f"The checkpoint {config.ckpt_path} does not exist.")

    def _run_subcommand(self, subcommand: str) -> None:
        """Runs it; a run that fails before its first step leaves no folder, though loggers made one."""
        try:
            super()._run_subcommand(subcommand)
        except Exception:
            root = Path(self.trainer.default_root_dir)
            if root in self._new_folders and not (root / CONFIG).exists():
                shutil.rmtree(root, ignore_errors=True)
                for folder in self._new_folders[1:]:
                    with contextlib.suppress(OSError):  # not empty: other runs live there
                        folder.rmdir()
            raise

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Adds the loggers of a run's folder and the progress bar."""
        settings = self._get(self.config_init, "trainer")
        callbacks = list(settings.callbacks or [])
        if settings.enable_progress_bar is not False:
            callbacks.append(lightning_callbacks.RichProgressBar(leave=True))
        if self.subcommand == "predict":
            callbacks.append(callbacks_of_runs.GenerationWriter())
        if self.subcommand == "fit":
            callbacks.append(callbacks_of_runs.NoiseMask())
        if settings.logger is None or settings.logger is True:
            root = settings.default_root_dir
            if self.subcommand == "fit":
                kwargs["logger"] = [
                    TensorBoardLogger(root, name="tensorboard", version=""),
                    ContinuedCSVLogger(root, name="", version=""),
                ]
                callbacks.append(lightning_callbacks.LearningRateMonitor("step"))
            else:
                kwargs["logger"] = False
        return super().instantiate_trainer(callbacks=callbacks, **kwargs)


def _every(weighting: Namespace | None) -> int | None:
    """The weighting's ``every``; None for one that does not learn."""
    return weighting.get("init_args", {}).get("every") if weighting is not None else None


def _run_folder(config: Namespace) -> str:
    """``runs/<task>-<method>-noise<percent>-seed<seed>``; ``runs/<task>-sft`` for SFT.

    Noise of other kinds than one rate is named by both its rates, or by its kind.
    """
    data, model = config.data.init_args, config.model.init_args
    if "method" not in model:
        return os.path.join("runs", f"{data.task}-sft")
    rates = data.get("noise_rates") or [data.noise_rate]
    noise = "-".join(f"{100 * rate:g}" for rate in rates)
    noise = "mask" if data.get("noise_mask") else noise
    noise = "categories" if data.get("category_noise_rates") else noise
    return os.path.join("runs", f"{data.task}-{model.method}-noise{noise}-seed{config.seed_everything}")


def _tool(name: str) -> ModuleType:
    return import_module(f".{TOOLS[name]}", __package__)


def _help() -> str:
    """What ``pacmr --help`` prints: the trainer's commands and the tools."""
    commands = {**RUNS, **{name: _tool(name).__doc__.splitlines()[0] for name in TOOLS}}
    lines = [f"  {name:<12}{text}" for name, text in commands.items()]
    return "\n".join(
        [
            "usage: pacmr COMMAND ...",
            "",
            "Learning from noisy human preferences.",
            "",
            "trainer runs (LightningCLI; --config can be given several times, later ones win):",
            *lines[: len(RUNS)],
            "",
            "tools around them:",
            *lines[len(RUNS) :],
            "",
            "pacmr COMMAND --help says more; pacmr fit --model.help CLASS explains a class's options.",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; bad input ends in one sentence and exit status 2."""
    words = sys.argv[1:] if arguments is None else arguments
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    if words in (["--help"], ["-h"]):
        print(_help())
        sys.exit(0)
    try:
        if words and words[0] in TOOLS:
            _tool(words[0]).main(words[1:])
        else:
            # None and not sys.argv, which the processes of DDP are started with once more.
            PacmrCLI(arguments)
    except MisconfigurationException as error:
        stop(str(error))
    except Exception as error:
        cause = user_error(error) or full_disk(error)
        if cause is None:
            raise
        stop(str(cause))
