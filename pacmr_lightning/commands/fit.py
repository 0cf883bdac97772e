"""Commands ``pacmr fit``, ``validate``, ``test`` and ``predict``: LightningCLI with a folder per run."""

import contextlib
import os
import shutil
import signal
import sys
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import lightning.pytorch.callbacks as lightning_callbacks
import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only

# Importing the packages registers the short names of their classes for YAML.
from ..callbacks import GenerationWriter, LogProgress, NoiseMask, RunCheckpoint
from ..command_line.output import only_results, plain_table, print_result
from ..command_line.short_forms import expanded
from ..datamodules import PreferenceDataModule, SFTDataModule  # noqa: F401
from ..datamodules.stream import check_rank_shares
from ..errors import UserError
from ..files import check_writable, only_one
from ..modules import PreferenceModule, SFTModule  # noqa: F401
from ..runs.checkpoints import CheckpointFiles, to_resume_from
from ..runs.config import SaveRunConfig, check_flags, resolve_auto, use_lora_deepspeed
from ..runs.folder import CHECKPOINTS, CONFIG, METRICS, default_folder, unmoved
from ..runs.loggers import ContinuedCSVLogger, RunBoard, wandb_ends
from ..runs.option_parser import UNIONS, OptionParser
from ..strategies import check_strategy

UNIONS.append(Strategy | str)  # a class path is no strategy's name


class Parser(OptionParser, LightningArgumentParser):
    """LightningCLI's parser with errors in one sentence, and short forms of options."""

    def parse_args(self, args: Any = None, *rest: Any, **options: Any) -> Any:
        """Expand short forms first; processes started by DDP do the same."""
        words = list(sys.argv[1:] if args is None else args)
        words = ["--help" if word == "--help_all" else word for word in words]
        return super().parse_args(expanded(words), *rest, **options)

    def dump(self, config: Any, *rest: Any, **options: Any) -> Any:
        """Keep the targets of links where the module lacks their sources, as in SFT."""
        options.setdefault("skip_link_targets", "model.init_args.policy" in config)
        return super().dump(config, *rest, **options)


class PacmrCLI(LightningCLI):
    """LightningCLI with one folder per run, ``runs/<name>/``, for config, metrics and checkpoints.

    It adds the section ``checkpoint``, links options of module and datamodule, and logs to ``metrics.csv``
    and to TensorBoard or the loggers of ``trainer.logger``, unless that is false.
    """

    def __init__(self, args: list[str] | None = None):
        words = sys.argv[1:] if args is None else args
        self._asked = words[0] if words else None
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

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # Lightning's is static
        """Return the given subcommand only, since building the other parsers is slow."""
        commands = super().subcommands()
        return {name: skip for name, skip in commands.items() if self._asked in (name, None)} or commands

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the checkpoint section and the links between module and datamodule."""
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.save_last": True,
                "checkpoint.filename": "step-{step}",
                "checkpoint.auto_insert_metric_name": False,
                # Its table counts metrics and 0 FLOPs; the modules print their parameter counts.
                "trainer.enable_model_summary": False,
            }
        )
        weighting, model = "model.init_args.weighting", "model.init_args.policy.init_args.model"
        parser.link_arguments((weighting, "data"), "data.init_args.meta_every", compute_fn=_every)
        parser.link_arguments((model, "data"), "data.init_args.tokenizer", compute_fn=_linked)

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "predict":
            parser.add_lightning_class_args(GenerationWriter, "generation")
        return parser

    def _dump_config(self) -> None:
        """Keep the options as plain values. Lightning's version validates them again, which takes longer."""
        if not hasattr(self, "config_dump"):
            text = self.parser.dump(self.config, skip_unset=False, skip_validation=True)
            self.config_dump = yaml.safe_load(text)[self.subcommand]

    def after_fit(self) -> None:
        """Print the run's folder."""
        if not self.trainer.is_global_zero or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        root = self.config.fit.trainer.default_root_dir
        boards = [each for each in self.trainer.loggers if isinstance(each, TensorBoardLogger)]
        curves = f"tensorboard --logdir {boards[0].save_dir}" if boards else f"{root}/{METRICS}"
        curves = f"; its curves: {curves}" if self.trainer.loggers else ""
        used = getattr(getattr(self.model, "weighting", None), "audit", None)
        used = used or vars(self.datamodule).get("curriculum")
        report = Path(used).with_name("report.html") if used else f"pacmr audit {root}"
        more = f"; suspected label errors: {report}" if isinstance(self.model, PreferenceModule) else ""
        print(f"The run is in {root}{curves}{more}", flush=True)
        if isinstance(self.model, PreferenceModule) and (still := unmoved(self.trainer.callback_metrics)):
            rate, steps = self.model.learning_rate, self.trainer.global_step
            print(
                f"{still}. Raise --model.learning_rate ({rate:g}) or train for more updates ({steps:,}); "
                "docs/when_dpo_goes_wrong.md has more.",
                file=sys.stderr,
            )

    def after_validate(self) -> None:
        """Print the metrics as a result, apart from Lightning's messages."""
        if self.trainer.is_global_zero and self.config[self.subcommand].verbose:
            table = plain_table("metric", "value")
            for name, value in sorted(self.trainer.callback_metrics.items()):
                table.add_row(name, f"{value:.6g}")
            print_result(table)

    after_test = after_validate

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        return {**kwargs, "verbose": False} if "verbose" in kwargs else kwargs

    instantiate_classes = only_results()(LightningCLI.instantiate_classes)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning's version overrides the command line with the checkpoint's options."""

    def before_instantiate_classes(self) -> None:
        """Set the run's folder, refuse to overwrite a run, and find the checkpoint to resume from."""
        config = self.config[self.subcommand]
        if config.trainer.default_root_dir is None:
            model, data = config.model.init_args, config.data.init_args
            config.trainer.default_root_dir = default_folder(model, data, config.seed_everything)
        if not (given := config.trainer.default_root_dir) or "://" in given:
            raise UserError(f"--output is {given!r}, but it must be a local folder.")
        # As the Trainer's property, which callbacks read.
        root = Path(os.path.normpath(given))
        config.trainer.default_root_dir = str(root)
        check_flags(config)
        resolve_auto(config)
        use_lora_deepspeed(config)
        if (given := config.checkpoint.dirpath) is not None:
            raise UserError(
                f"checkpoint.dirpath is {given}, but audit, refine and export read the run's own folder; "
                "leave it out, and name that folder with --output."
            )
        self._continues = config.ckpt_path is not None
        fits, files = self.subcommand == "fit", [Path(one.relative) for one in config.config or () if one]
        if fits and not config.trainer.fast_dev_run:
            check_writable("--output", str(root), root)
        config.ckpt_path, self._first_step = to_resume_from(config.ckpt_path, root / CHECKPOINTS, fits, files)
        config.checkpoint.dirpath = None if config.trainer.fast_dev_run else str(root / CHECKPOINTS)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run it; a failure leaves no new folder before step 1, and no new config before a checkpoint."""
        root = Path(self.trainer.default_root_dir)
        new = [folder for folder in (root, *root.parents) if not folder.exists()]
        fits = subcommand == "fit" and not self.trainer.fast_dev_run  # type: ignore[attr-defined]
        alone = fits and not rank_zero_only.rank  # type: ignore[attr-defined]
        with only_one(root) if alone else contextlib.nullcontext():
            if (had_config := (root / CONFIG).exists()) and fits and not self._continues:
                raise UserError(
                    f"The folder {root} already holds a run; continue it with --ckpt_path last, or name "
                    "another folder with --output."
                )
            for left in root.rglob(".*.partial") if alone else ():
                shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
            try:
                with wandb_ends(), only_results():
                    super()._run_subcommand(subcommand)
            except Exception:
                # Other processes would repeat this one's error.
                if self.trainer.strategy.launcher is not None:
                    self.trainer.strategy.launcher.kill(signal.SIGKILL)
                self._clean_up(root, new, new_config=subcommand == "fit" and not had_config)
                raise

    def _clean_up(self, root: Path, new: list[Path], new_config: bool) -> None:
        """Remove what a failed call has made, unless a later one can use it."""
        # The next run of predict uses stored answers.
        began = self.trainer.global_step > 0 and (root / CONFIG).exists()
        kept = began or any(root.glob("*.answers.sqlite"))
        if root in new and not kept:
            shutil.rmtree(root, ignore_errors=True)
            for folder in new[1:]:
                with contextlib.suppress(OSError):  # not empty: it has other runs
                    folder.rmdir()
        elif new_config and not any((root / CHECKPOINTS).glob("*.ckpt")):
            (root / CONFIG).unlink(missing_ok=True)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add loggers, progress bar and checkpoint files, and check the number of processes."""
        settings, fits = self.config_init[self.subcommand].trainer, self.subcommand == "fit"
        plugins, callbacks = _as_list(settings.plugins), _as_list(settings.callbacks)
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(CheckpointFiles())
        own = (lightning_callbacks.ProgressBar, LogProgress)
        if settings.enable_progress_bar is not False and not any(isinstance(c, own) for c in callbacks):
            if self.subcommand in ("fit", "predict") and not sys.stderr.isatty():
                kwargs["enable_progress_bar"] = False
                callbacks.append(LogProgress())
            else:
                callbacks.append(lightning_callbacks.RichProgressBar(leave=True))
        default = settings.logger is None or settings.logger is True
        if fits:
            callbacks.append(NoiseMask())
        others = [
            c for c in callbacks if isinstance(c, lightning_callbacks.ModelCheckpoint) and c.dirpath is None
        ]
        for number, other in enumerate(others, 2):  # Lightning's default is the first logger's folder
            other.dirpath = str(Path(settings.default_root_dir) / f"{CHECKPOINTS}-{number}")
        if fits and settings.logger is not False:
            folder = settings.default_root_dir
            given = [RunBoard(folder, self._first_step)] if default else _as_list(settings.logger)
            kwargs["logger"] = [*given, ContinuedCSVLogger(folder, name="", version="")]
            monitor = lightning_callbacks.LearningRateMonitor
            if not any(isinstance(callback, monitor) for callback in callbacks):
                callbacks.append(monitor("step"))
        elif default:
            kwargs["logger"] = False
        started = int(os.environ["WORLD_SIZE"]) if TorchElasticEnvironment.detect() else None
        if started:
            # Otherwise Lightning on a CPU treats each of torchrun's processes as a run of its own.
            local = int(os.environ["LOCAL_WORLD_SIZE"])
            if settings.devices == "auto":
                kwargs["devices"] = local
            if settings.num_nodes == 1:
                kwargs["num_nodes"] = started // local
        trainer = super().instantiate_trainer(callbacks=callbacks, plugins=plugins, **kwargs)
        processes = trainer.num_devices * trainer.num_nodes
        if started and processes != started:
            raise UserError(
                f"torchrun has started {started} processes, but trainer.devices is {trainer.num_devices} and "
                f"trainer.num_nodes {trainer.num_nodes}; leave trainer.devices out, or start as many."
            )
        if isinstance(self.model, PreferenceModule):
            check_strategy(trainer.strategy, self.model.policy.quantization)
        if fits and isinstance(self.datamodule, PreferenceDataModule):
            # Checked before the processes start.
            check_rank_shares("global_batch_size", self.datamodule.global_batch_size, processes)
            if self.datamodule.meta_every is not None:
                check_rank_shares("meta_batch_size", self.datamodule.meta_batch_size, processes)
        return trainer


class _ParserOnly(PacmrCLI):
    config: Any = {"subcommand": None}  # noqa: RUF012

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    parse_arguments = _set_seed = _add_instantiators = _nothing
    before_instantiate_classes = instantiate_classes = _nothing


@cache
def parser_of(subcommand: str) -> Any:
    """Return the parser of one subcommand."""
    return _ParserOnly([subcommand])._subcommand_parsers[subcommand]


def _as_list(value: Any) -> list[Any]:
    return list(value or []) if isinstance(value, (list, tuple, type(None))) else [value]


def _every(weighting: Namespace | None, data: Namespace | None) -> int | None:
    """Return the weighting's ``every``, an option or class attribute; None for one without meta-batches."""
    every = None
    if weighting is not None and (kind := resolve_name(weighting.class_path)).needs_meta:
        every = (weighting.get("init_args") or {}).get("every", kind.every)
    return _linked(every, data, "meta_every")


def _linked(value: Any, data: Namespace | None, name: str = "tokenizer") -> Any:
    if data and (given := data.get(f"init_args.{name}")) not in (None, value):
        raise UserError(
            f"data.{name} is {given}, but the model's options make it {value or 'null'}; leave it out."
        )
    return value
