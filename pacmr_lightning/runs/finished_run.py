"""Loading of a finished run: the policy of a checkpoint, and its data."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import rank_zero_info

from ..errors import UserError
from ..files import expanded, local_path
from ..modules import PreferenceModule
from ..policy import PolicyModel
from .checkpoints import unreadable
from .folder import CHECKPOINTS, CONFIG, SUMMARY
from .option_parser import OptionParser, short_message

MOST_AT_ONCE = 32
PreferenceData = Any
"""A run's ``PreferenceDataModule``, or a user's own, which this package does not import."""
NO_NOISE: dict[str, Any] = {"noise_rate": 0.0, "noise": None}
"""Options of the datamodule that leave labels as found in the data."""


@dataclass
class FinishedRun:
    """Files and configuration of a finished run, not loaded yet."""

    folder: str
    model: dict[str, Any]
    data: dict[str, Any]
    trainer: dict[str, Any]
    base: str
    """Folder or Hub id of the base model, which has the tokenizer."""
    checkpoint: Path

    @property
    def noise(self) -> str:
        """Return the options of the injected label noise; empty for none."""
        options = self.data["init_args"]
        given = {name: options[name] for name in NO_NOISE if options.get(name)}
        if kind := given.pop("noise", None):
            given[kind["class_path"]] = kind.get("init_args") or ""
        return ", ".join(f"{name} {value}".strip() for name, value in given.items())


def find_run(folder: str, checkpoint: str) -> FinishedRun:
    """Return the run in a folder, with the named checkpoint; UserError if it is no preference run."""
    path = local_path(folder) / CONFIG
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; name the folder of a run that pacmr fit has trained. A Python program "
            "calls pacmr_lightning.audit.audit(module, datamodule) after its fit."
        )
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        model, data, trainer = (config[section] for section in ("model", "data", "trainer"))
        options = model["init_args"]
        preference = "policy" in options and "source" in data["init_args"]
        base = expanded(options["policy"]["init_args"]["model"]) if preference else ""
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} is not the configuration of a run; name the folder of a run that pacmr fit has trained."
        ) from None
    if not preference:
        raise UserError(
            f"The {CONFIG} of {folder} is not that of a preference run; name a run of DPO or another method. "
            "SFT writes a plain Hugging Face model when it ends, into the folder model of the run."
        )
    checkpoints = path.parent / CHECKPOINTS
    saved = checkpoints / f"{checkpoint}.ckpt"
    if not saved.exists():
        names = sorted(file.stem for file in checkpoints.glob("*.ckpt"))
        fix = f"choose one of {', '.join(names)}" if names else "train it until it has one"
        raise UserError(f"The run {folder} has no checkpoint {checkpoint}; {fix}.")
    if saved.is_dir():
        raise UserError(
            f"{saved} is a folder, as sharding strategies write it; train with trainer.strategy ddp or auto "
            "to get a single file."
        )
    if "RunSummary" in str(trainer.get("callbacks")) and not (path.parent / SUMMARY).exists():
        rank_zero_info(f"The run {folder} has not ended; the policy is that of its checkpoint {checkpoint}.")
    return FinishedRun(str(path.parent), model, data, trainer, base, saved)


def load_run(
    run: FinishedRun, augmentations: str | None = None, *, as_trained: bool = False
) -> tuple[PreferenceModule, PreferenceData, int]:
    """Return the run's module with the checkpoint's adapter, its datamodule, and the policy's step.

    Without a ``micro_batch_size`` the module takes a whole batch at once, ``MOST_AT_ONCE`` pairs at most.
    ``as_trained`` gives the run's training pairs, with its label noise and without held-out clean pairs;
    else all pairs, with original labels and with ``augmentations`` (a file; None for the run's own).
    """
    parser = OptionParser(exit_on_error=False)
    for kind, section in ((LightningModule, "model"), (LightningDataModule, "data")):
        parser.add_subclass_arguments(kind, section, fail_untyped=False)
    # The tokenizer is linked to the model, so config.yaml lacks it.
    options = run.data["init_args"] | {"tokenizer": run.base}
    if as_trained:
        # Clean pairs, which may be held out, are read only for meta-batches.
        options["meta_every"] = 1 if options.get("clean_meta") else None
    else:
        chosen = ("clean_meta", "curriculum", "curriculum_share")
        options = {name: value for name, value in options.items() if name not in chosen}
        options |= {name: value for name, value in NO_NOISE.items() if name in options}
        # With meta-batches the datamodule reads augmented prompts, whatever the method.
        options["meta_every"] = 1
    if augmentations is not None:
        options["augmentations"] = augmentations
    try:
        config = parser.parse_object({"model": run.model, "data": run.data | {"init_args": options}})
    except ArgumentError as error:
        reason = short_message(error)
        raise UserError(f"The {CONFIG} of {run.folder} cannot be used: {reason}") from None
    objects = parser.instantiate(config)
    if objects.model.micro_batch_size is None:
        objects.model.micro_batch_size = min(objects.data.global_batch_size, MOST_AT_ONCE)
    checkpoint = _restore(objects.model, run.checkpoint)
    objects.data.trained_options = checkpoint.get("options", {})
    guard = checkpoint.get("KLGuard", {})
    step = guard["step"] if guard.get("ended") else checkpoint["global_step"]  # where it went back
    return objects.model, objects.data, step


def ready(module: PreferenceModule) -> PolicyModel:
    """Return the policy of a loaded module, in evaluation mode and on the accelerator if there is one."""
    Fabric(accelerator="auto", devices=1).to_device(module.policy)
    return module.policy.eval()


def _restore(module: PreferenceModule, path: Path) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is unusable: {unreadable(error)}; name another with --checkpoint.") from None
    module.configure_model()
    try:
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"], strict=False)
        return checkpoint
    except (KeyError, TypeError, RuntimeError):
        raise UserError(
            f"{path} does not fit the model of the run's {CONFIG}; name the checkpoint of another step, or "
            "restore the file that the run was trained with."
        ) from None
